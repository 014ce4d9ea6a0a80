"""The configuration of the services: every field by flag and variable, and what cannot be
served.
"""

import argparse
import dataclasses
import re
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.cli.serve_config import ServeConfig
from foredraft.config.algorithms import ALGORITHMS, Algorithm
from foredraft.config.options import add_arguments, flag_of, given_values, to_flags, value_type
from foredraft.config.services import (
    DraftConfig,
    GatewayConfig,
    VerifyConfig,
)
from foredraft.config.speculation import SpeculationConfig, each_draft
from foredraft.errors import ConfigError

CONFIGS = (GatewayConfig, VerifyConfig, DraftConfig)


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_are_legal(config: type) -> None:
    config()


@pytest.mark.parametrize("config", CONFIGS)
def test_every_flag_is_explained_by_a_sentence(config: type) -> None:
    for field in dataclasses.fields(config):
        assert re.fullmatch(r"[A-Za-z\-/0-9 ].*\.", field.metadata["help"], re.S), field.name


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_can_be_set_by_flag_and_by_variable(config: type) -> None:
    hints = typing.get_type_hints(config)
    texts = {int: "3", float: "1.0", bool: "1", str: "x"}
    for field in dataclasses.fields(config):
        kind, repeated = value_type(hints[field.name])
        text = field.metadata["choices"][-1] if field.metadata["choices"] else texts[kind]
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_arguments(parser, config)
        flags = [flag_of(field.name)] if kind is bool else [flag_of(field.name), text]
        by_flag = given_values(config, parser.parse_args(flags), {})
        by_variable = given_values(
            config, parser.parse_args([]), {"FOREDRAFT_" + field.name.upper(): text}
        )
        assert by_flag == by_variable
        value = by_flag[field.name]
        assert isinstance(value[0] if repeated else value, kind)


ILLEGAL: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"speculative_algorithm": "STANDALONE"},
        ["--speculative-algorithm STANDALONE", "--speculative-draft-model-path"],
    ),
    (
        {"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "m"},
        ["--speculative-draft-model-path", "--speculative-algorithm NGRAM"],
    ),
    (
        {"speculative_algorithm": "NONE", "speculative_draft_model_path": "m"},
        ["--speculative-draft-model-path", "--speculative-algorithm NONE"],
    ),
    ({"speculative_accept_threshold_single": 0.0}, ["--speculative-accept-threshold-single"]),
    ({"speculative_accept_threshold_acc": 1.5}, ["--speculative-accept-threshold-acc"]),
    ({"speculative_num_steps": 0}, ["--speculative-num-steps"]),
    ({"speculative_num_steps": 256}, ["--speculative-num-steps must be in [1, 255]"]),
    ({"speculative_eagle_topk": 0}, ["--speculative-eagle-topk"]),
    ({"speculative_eagle_topk": 65}, ["--speculative-eagle-topk must be in [1, 64]"]),
    *(
        (
            {"speculative_algorithm": algorithm, name: 4},
            [f"--{name.replace('_', '-')} has no use with --speculative-algorithm {algorithm}"],
        )
        for algorithm, names in (
            ("NGRAM", ("speculative_num_steps", "speculative_eagle_topk")),
            (
                "NONE",
                (
                    "speculative_num_steps",
                    "speculative_eagle_topk",
                    "speculative_num_draft_tokens",
                ),
            ),
        )
        for name in names
    ),
    ({"speculative_num_draft_tokens": 1}, ["--speculative-num-draft-tokens"]),
    ({"speculative_num_draft_tokens": 257}, ["--speculative-num-draft-tokens"]),
    (
        {"speculative_ngram_max_trie_depth": 8, "speculative_ngram_branch_length": 8},
        ["--speculative-ngram-max-trie-depth", "--speculative-ngram-branch-length"],
    ),
    (
        {"speculative_ngram_max_trie_depth": 8, "speculative_ngram_max_match_window_size": 8},
        ["--speculative-ngram-max-trie-depth", "--speculative-ngram-max-match-window-size"],
    ),
    ({"speculative_ngram_max_trie_depth": 1}, ["--speculative-ngram-max-trie-depth"]),
    (
        {"speculative_ngram_min_match_window_size": 13},
        ["--speculative-ngram-min-match-window-size", "--speculative-ngram-max-match-window-size"],
    ),
    (
        {"speculative_ngram_min_bfs_breadth": 11},
        ["--speculative-ngram-min-bfs-breadth", "--speculative-ngram-max-bfs-breadth"],
    ),
    ({"speculative_ngram_max_bfs_breadth": 257}, ["--speculative-ngram-max-bfs-breadth"]),
    ({"speculative_ngram_max_match_window_size": 0}, ["--speculative-ngram-max-match-window-size"]),
    ({"speculative_ngram_branch_length": 0}, ["n-gram windows"]),
    ({"speculative_ngram_capacity": 10}, ["--speculative-ngram-capacity"]),
    ({"speculative_ngram_capacity": 2**31}, ["--speculative-ngram-capacity"]),
    (
        {"speculative_algorithm": "EAGLE3"},
        ["--speculative-algorithm EAGLE3", "--speculative-draft-model-path"],
    ),
    (
        {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": "m",
            "speculative_token_map": "t",
        },
        ["--speculative-token-map", "--speculative-algorithm EAGLE3", "d2t"],
    ),
    (
        {"speculative_token_map": "t"},
        ["--speculative-token-map", "--speculative-algorithm NGRAM"],
    ),
    (
        {"enable_multi_layer_eagle": True},
        ["--enable-multi-layer-eagle", "--speculative-algorithm NGRAM"],
    ),
    (
        {
            "speculative_algorithm": "MTP",
            "enable_multi_layer_eagle": True,
            "speculative_num_steps": 2,
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 4,
        },
        ["--enable-multi-layer-eagle", "--speculative-eagle-topk"],
    ),
    (
        {"speculative_draft_ahead": True},
        ["--speculative-draft-ahead", "--speculative-algorithm NGRAM"],
    ),
    (
        {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": "m",
            "speculative_draft_ahead": True,
        },
        ["--speculative-draft-ahead", "--speculative-algorithm EAGLE3"],
    ),
    (
        {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": "m",
            "speculative_num_steps": 2,
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 4,
            "speculative_draft_ahead": True,
        },
        ["--speculative-draft-ahead", "--speculative-eagle-topk"],
    ),
    (
        {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": "m",
            "speculative_num_steps": 9,
            "speculative_draft_ahead": True,
        },
        ["--speculative-draft-ahead", "--speculative-num-steps"],
    ),
    (
        {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": "m",
            "speculative_ngram_override": True,
            "speculative_draft_ahead": True,
        },
        ["--speculative-draft-ahead", "--speculative-ngram-override"],
    ),
    (
        {"speculative_draft_model_quantization": "fp8"},
        ["--speculative-draft-model-quantization", "--speculative-algorithm NGRAM"],
    ),
    (
        {"speculative_draft_model_quantization": "int8"},
        ["--speculative-draft-model-quantization", "--speculative-algorithm NGRAM"],
    ),
]
STANDALONE = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "m"}
ILLEGAL_TREES: list[tuple[dict[str, Any], list[str]]] = [
    ({"speculative_eagle_topk": 2}, ["--speculative-num-steps"]),
    ({"speculative_num_draft_tokens": 4}, ["--speculative-num-steps"]),
    (
        {"speculative_num_steps": 3, "speculative_eagle_topk": 2},
        ["--speculative-eagle-topk", "--speculative-num-draft-tokens"],
    ),
    (
        {"speculative_num_steps": 3, "speculative_num_draft_tokens": 5},
        ["--speculative-num-steps", "--speculative-num-draft-tokens 5"],
    ),
    (
        {
            "speculative_num_steps": 2,
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 8,
        },
        ["--speculative-num-draft-tokens 8", "--speculative-eagle-topk 2"],
    ),
]


@pytest.mark.parametrize("config", [SpeculationConfig, VerifyConfig, DraftConfig])
@pytest.mark.parametrize(
    ("values", "named"), [*ILLEGAL, *((STANDALONE | tree, named) for tree, named in ILLEGAL_TREES)]
)
def test_what_cannot_be_served_is_refused_by_its_flags(
    config: type, values: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        config(**values)
    for flag in named:
        assert flag in str(refused.value)


@pytest.mark.parametrize("config", [VerifyConfig, DraftConfig])
def test_8_bit_floats_do_not_go_with_a_cpu(config: type) -> None:
    with pytest.raises(ConfigError, match=r"--speculative-draft-model-quantization.*--device cpu"):
        config(**STANDALONE, device="cpu", speculative_draft_model_quantization="fp8")
    config(**STANDALONE, speculative_draft_model_quantization="fp8")


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ({"speculative_algorithm": "NONE"}, (0, 0, 1)),
        ({}, (11, 10, 12)),
        ({"speculative_num_draft_tokens": 8}, (7, 10, 8)),
        (STANDALONE, (3, 1, 4)),
        (STANDALONE | {"speculative_num_steps": 5}, (5, 1, 6)),
        (
            STANDALONE
            | {
                "speculative_num_steps": 2,
                "speculative_eagle_topk": 2,
                "speculative_num_draft_tokens": 7,
            },
            (2, 2, 7),
        ),
    ],
)
def test_tree_limits(values: dict[str, Any], limits: tuple[int, int, int]) -> None:
    assert SpeculationConfig(**values).tree_limits == limits


SEVERAL = {"speculative_algorithm": "EAGLE3,NGRAM", "speculative_draft_model_path": "m"}


def test_several_drafts_have_a_configuration_each() -> None:
    config = VerifyConfig(**SEVERAL, speculative_num_steps=4)
    assert config.algorithms == ("EAGLE3", "NGRAM")
    assert config.tree_limits == (11, 10, 12)
    head, ngram = each_draft(config)
    assert (head.speculative_draft_model_path, head.tree_limits) == ("m", (4, 1, 5))
    assert (ngram.speculative_draft_model_path, ngram.tree_limits) == ("", (11, 10, 12))
    assert each_draft(head) == [head]


@pytest.mark.parametrize(
    ("algorithms", "message"),
    [
        ("NONE,NGRAM", "NONE goes with no other"),
        ("NGRAM,NGRAM", "each may be given once"),
        ("NEXTN,EAGLE", "each may be given once"),
        ("NGRAM,EAGLE3", "EAGLE3 needs --speculative-draft-model-path"),
    ],
)
def test_drafts_that_do_not_go_together_are_refused(algorithms: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VerifyConfig(speculative_algorithm=algorithms)


def test_each_of_several_models_has_a_name() -> None:
    config = VerifyConfig(
        speculative_algorithm="EAGLE3,NGRAM,STANDALONE,MTP",
        speculative_draft_model_path="eagle3=a=1,b,standalone=org/c",
        speculative_draft_model_revision="STANDALONE=main",
        speculative_token_map="map",
        enable_multi_layer_eagle=True,
        speculative_draft_ahead=True,
    )
    assert [one.speculative_draft_ahead for one in each_draft(config)] == [
        False,
        False,
        True,
        False,
    ]
    found = {
        one.speculative_algorithm: (
            one.speculative_draft_model_path,
            one.speculative_draft_model_revision,
            one.speculative_token_map,
            one.enable_multi_layer_eagle,
        )
        for one in each_draft(config)
    }
    assert found == {
        "EAGLE3": ("a=1,b", "", "", False),
        "NGRAM": ("", "", "", False),
        "STANDALONE": ("org/c", "main", "map", False),
        "MTP": ("", "", "map", True),
    }
    alone = VerifyConfig(
        speculative_algorithm="EAGLE3", speculative_draft_model_path="EAGLE3=unix=a,b"
    )
    assert alone.speculative_draft_model_path == "unix=a,b"


@pytest.mark.parametrize(
    ("algorithms", "path", "message"),
    [
        ("EAGLE3,STANDALONE", "m", "EAGLE3 and STANDALONE have a model each; give NAME=PATH"),
        ("EAGLE3,STANDALONE", "EAGLE3=m", "STANDALONE needs --speculative-draft-model-path"),
        ("EAGLE3,MTP", "EAGLE3=m,EAGLE=n", "EAGLE is not among --speculative-algorithm EAGLE3,MTP"),
        ("EAGLE3,MTP", "EAGLE3=m,EAGLE3=n", "each name may be given once"),
        ("EAGLE3", "STANDALONE=m", "STANDALONE is not among --speculative-algorithm EAGLE3"),
    ],
)
def test_models_that_are_not_told_apart_are_refused(
    algorithms: str, path: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        VerifyConfig(speculative_algorithm=algorithms, speculative_draft_model_path=path)


@pytest.mark.parametrize(
    ("values", "addresses"),
    [
        ({"draft": ("unix:/a=b",)}, {"NGRAM": "unix:/a=b"}),
        ({"draft": ("ngram=host:1",)}, {"NGRAM": "host:1"}),
        ({"draft": ("EAGLE=host:1",), "speculative_algorithm": "MTP"}, {"MTP": "host:1"}),
        ({"draft": ("",)}, {}),
        ({"draft": ("host:1",), "speculative_algorithm": "NONE"}, {}),
        (SEVERAL | {"draft": ("NGRAM=a:1", "eagle3=b:2")}, {"EAGLE3": "b:2", "NGRAM": "a:1"}),
    ],
)
def test_each_draft_has_an_address(values: dict[str, Any], addresses: dict[str, str]) -> None:
    found = VerifyConfig(**values).draft_addresses()
    assert list(found.items()) == list(addresses.items())


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        (("a:1", "b:2"), "must be NAME=ADDRESS"),
        (("EAGLE3=a:1", "b:2"), "must be NAME=ADDRESS"),
        (("EAGLE3=a:1",), "no address for NGRAM"),
        (("NGRAM=a:1", "NGRAM=b:2"), "NGRAM has an address already"),
        (("NGRAM=a:1", "EAGLE3=a:1"), "EAGLE3=a:1: another draft is there"),
        (("NGRAM=", "EAGLE3=a:1"), "NGRAM=: no address"),
    ],
)
def test_drafts_without_names_are_refused(drafts: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VerifyConfig(**SEVERAL, draft=drafts).draft_addresses()


def test_algorithms_are_joined_by_commas() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, SpeculationConfig)
    namespace = parser.parse_args(["--speculative-algorithm", "ngram, standalone"])
    assert given_values(SpeculationConfig, namespace) == {
        "speculative_algorithm": "NGRAM,STANDALONE"
    }
    namespace = parser.parse_args(["--speculative-algorithm", "NGRAM,GUESS"])
    with pytest.raises(ConfigError, match="'GUESS' is not one of"):
        given_values(SpeculationConfig, namespace)


def test_nextn_is_eagle() -> None:
    assert SpeculationConfig(speculative_algorithm="NEXTN").speculative_algorithm == "EAGLE"


def test_both_names_of_the_window_are_understood() -> None:
    assert SpeculationConfig().ngram_window == (12, 18)
    assert SpeculationConfig(speculative_ngram_max_trie_depth=9).ngram_window == (9, 9)


@given(
    steps=st.integers(1, 8),
    topk=st.integers(1, 6),
    tokens=st.none() | st.integers(2, 64),
)
def test_a_tree_that_is_let_through_can_be_built(steps: int, topk: int, tokens: int | None) -> None:
    try:
        config = SpeculationConfig(
            **STANDALONE,
            speculative_num_steps=steps,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=tokens,
        )
    except ConfigError:
        return
    num_steps, width, rows = config.tree_limits
    # Nodes of all levels: topk next to the root, then topk children of each of topk beams.
    assert 1 <= rows - 1 <= width + (num_steps - 1) * width * width


@pytest.mark.parametrize("config", CONFIGS)
def test_a_service_started_by_flags_gets_the_same_configuration(config: type) -> None:
    values = {
        field.name: field.default
        for field in dataclasses.fields(config)
        if field.default is not None and not (field.metadata["filled"] and field.default == "")
    }
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, config)
    assert config(**given_values(config, parser.parse_args(to_flags(values)), {})) == config()


@pytest.mark.parametrize(
    "line",
    [
        (
            "--model m --speculative-algo EAGLE --speculative-draft d --speculative-num-steps 5"
            " --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --mem-fraction 0.7"
            " --cuda-graph-max-bs 2 --dtype float16 --log-level warning"
        ),
        (
            "--model-path m --host 0.0.0.0 --trust-remote-code --speculative-algorithm EAGLE"
            " --speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"
            " --mem-fraction 0.5"
        ),
    ],
)
def test_command_lines_of_sglangs_pages_are_read(line: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_arguments(parser, ServeConfig)
    config = ServeConfig(**given_values(ServeConfig, parser.parse_args(line.split()), {}))
    assert config.algorithms == ("EAGLE",)
    assert config.mem_fraction_static in (0.5, 0.7)


def test_what_sglang_command_lines_have_is_taken() -> None:
    VerifyConfig(enable_torch_compile=True, torch_compile_max_bs=8)
    VerifyConfig(speculative_attention_mode="decode")


def test_a_tree_is_checked_without_a_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Algorithm(has_model=False, reads_hidden=False)
    monkeypatch.setitem(ALGORITHMS, "OTHER", kind)
    found = SpeculationConfig(speculative_algorithm="OTHER", speculative_num_steps=5)
    assert found.tree_limits == (5, 1, 6)
    with pytest.raises(ConfigError, match=r"need --speculative-num-steps beside them"):
        SpeculationConfig(speculative_algorithm="OTHER", speculative_num_draft_tokens=8)
