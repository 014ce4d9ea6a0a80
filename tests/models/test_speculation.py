"""Flags completed for a target: EAGLE or MTP, trees by architecture, depths by modules."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foredraft.config.services import DraftConfig, VerifyConfig
from foredraft.config.speculation import SpeculationConfig
from foredraft.errors import CheckpointError, ConfigError
from foredraft.models.speculation import find_algorithm, resolve
from testing.draft_heads import TinyHead, save_head, tiny_head


def write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    """Directories of targets and heads; nothing but config.json is read."""
    base = {**tiny_head("EAGLE").config, "max_position_embeddings": 64, "num_hidden_layers": 4}
    mimo = base | {"architectures": ["MiMoForCausalLM"]}
    configs = {
        "llama": base | {"architectures": ["LlamaForCausalLM"]},
        "qwen": base | {"architectures": ["Qwen2ForCausalLM"]},
        "mimo": mimo | {"num_nextn_predict_layers": 1},
        "mimo3": mimo | {"num_nextn_predict_layers": 3},
        "eagle": tiny_head("EAGLE").config,
        "eagle3": tiny_head("EAGLE3").config,
        "mtp": tiny_head("MTP").config,
        "mtp3": tiny_head("MTP", num_layers=3).config,
    }
    return {name: write(tmp_path / name, config) for name, config in configs.items()}


def resolved(
    models: dict[str, str], target: str, algorithm: str, head: str = "", **flags: Any
) -> SpeculationConfig:
    return resolve(
        DraftConfig(
            model_path=models[target],
            speculative_algorithm=algorithm,
            speculative_draft_model_path=models.get(head, ""),
            **flags,
        )
    )


@pytest.mark.parametrize(
    ("target", "algorithm", "head", "means", "limits"),
    [
        ("llama", "EAGLE", "eagle", "EAGLE", (5, 4, 8)),
        ("llama", "NEXTN", "eagle", "EAGLE", (5, 4, 8)),
        ("llama", "EAGLE3", "eagle3", "EAGLE3", (5, 4, 8)),
        ("llama", "MTP", "mtp", "MTP", (5, 4, 8)),
        ("llama", "EAGLE", "mtp", "MTP", (5, 4, 8)),
        ("qwen", "EAGLE", "eagle", "EAGLE", (3, 1, 4)),
        ("qwen", "EAGLE3", "eagle3", "EAGLE3", (3, 1, 4)),
        ("mimo", "EAGLE", "", "MTP", (3, 1, 4)),
        ("mimo", "NEXTN", "", "MTP", (3, 1, 4)),
        ("mimo", "MTP", "", "MTP", (3, 1, 4)),
        ("mimo", "EAGLE", "eagle", "EAGLE", (3, 1, 4)),
    ],
)
def test_algorithm_and_tree(
    models: dict[str, str],
    target: str,
    algorithm: str,
    head: str,
    means: str,
    limits: tuple[int, int, int],
) -> None:
    config = resolved(models, target, algorithm, head)
    assert (config.speculative_algorithm, config.tree_limits) == (means, limits)
    assert resolve(config) == config


@pytest.mark.parametrize(("target", "limits"), [("llama", (5, 1, 6)), ("qwen", (3, 1, 4))])
def test_on_a_cpu_trees_have_no_branches(
    models: dict[str, str], target: str, limits: tuple[int, int, int]
) -> None:
    assert resolved(models, target, "EAGLE", "eagle", device="cpu").tree_limits == limits
    given = DraftConfig(
        model_path=models[target],
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=models["eagle"],
    )
    assert resolve(given, on_cpu=True).tree_limits == limits


def test_given_trees_stay(models: dict[str, str]) -> None:
    tree = {
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 5,
    }
    assert resolved(models, "llama", "EAGLE", "eagle", **tree).tree_limits == (2, 2, 5)


def test_modules_are_depths(models: dict[str, str]) -> None:
    flag = {"enable_multi_layer_eagle": True}
    assert resolved(models, "mimo3", "EAGLE", **flag).tree_limits == (3, 1, 4)
    assert resolved(models, "llama", "MTP", "mtp3", **flag).tree_limits == (3, 1, 4)
    two = resolved(models, "mimo3", "MTP", speculative_num_steps=2, **flag)
    assert two.tree_limits == (2, 1, 3)


@pytest.mark.parametrize(
    ("target", "algorithm", "head", "flags", "message"),
    [
        ("llama", "EAGLE", "", {}, "EAGLE needs --speculative-draft-model-path: .* no MTP layers"),
        ("llama", "MTP", "", {}, "MTP needs --speculative-draft-model-path: .* no MTP layers"),
        ("mimo", "MTP", "", {"enable_multi_layer_eagle": True}, "there is one MTP layer"),
        ("llama", "EAGLE", "eagle", {"enable_multi_layer_eagle": True}, "a head for EAGLE"),
        (
            "mimo3",
            "MTP",
            "",
            {"enable_multi_layer_eagle": True, "speculative_num_steps": 4},
            "--speculative-num-steps 4 is more than the 3",
        ),
    ],
)
def test_what_the_models_do_not_have_is_refused(
    models: dict[str, str],
    target: str,
    algorithm: str,
    head: str,
    flags: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(models, target, algorithm, head, **flags)


def test_a_head_that_is_none(models: dict[str, str]) -> None:
    models["other"] = write(Path(models["llama"]) / "x", {"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(CheckpointError, match="not a draft head"):
        resolved(models, "llama", "EAGLE", "other")


@pytest.mark.parametrize("architectures", [5, [[]], {"a": 1}, [], None])
def test_a_draft_whose_architecture_is_no_name(architectures: Any, tmp_path: Path) -> None:
    head = tiny_head("EAGLE")
    tensors = {"norm.weight": head.tensors["fc.weight"]}  # of no head that is known
    head = TinyHead("EAGLE", head.config | {"architectures": architectures}, tensors)
    with pytest.raises(CheckpointError, match="not a draft head"):
        find_algorithm(save_head(head, tmp_path))


def test_nothing_is_read_where_no_head_drafts() -> None:
    for algorithm in ("NONE", "NGRAM"):
        config = VerifyConfig(model_path="/nowhere", speculative_algorithm=algorithm)
        assert resolve(config) is config


def test_torch_is_not_needed() -> None:
    program = "import sys, foredraft.models.speculation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
