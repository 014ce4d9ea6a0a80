"""Draft heads that are not exactly what they have to be: what is wrong is named, and nothing in a
file is run.
"""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.models.shared_weights import read_token_map
from foredraft.errors import CheckpointError
from testing.block_drafts import tiny_block
from testing.checkpoints import make_checkpoint
from testing.draft_heads import HIDDEN, VOCAB, TinyHead, save_head, tiny_head
from testing.loaded_heads import load, speculators

EAGLE, EAGLE3, MTP = tiny_head("EAGLE", 1), tiny_head("EAGLE3", 5), tiny_head("MTP", 13)
DSPARK = tiny_block("DSPARK", 2, confidence="both", layout="deepspec")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5)


def without(head: TinyHead, *names: str) -> TinyHead:
    kept = {name: t for name, t in head.tensors.items() if name not in names}
    return TinyHead(head.algorithm, head.config, kept, head.num_streams)


def with_(head: TinyHead, config: dict[str, Any] | None = None, **tensors: Any) -> TinyHead:
    added = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return TinyHead(
        head.algorithm, head.config | (config or {}), head.tensors | added, head.num_streams
    )


OFFSETS = EAGLE3.tensors["d2t"]
WRONG: dict[str, tuple[TinyHead, str]] = {
    "missing": (without(EAGLE, "layers.0.mlp.up_proj.weight"), r"missing tensor layers\.0\.mlp\.up_proj"),
    "missing-bias": (with_(without(EAGLE, "fc.bias"), {"bias": True}), r"missing tensor fc\.bias"),
    "unexpected-bias": (with_(EAGLE, {"bias": False}), r"unexpected tensor fc\.bias"),
    "unexpected": (with_(EAGLE, layers__0__input_layernorm__weight=torch.ones(HIDDEN)),
        r"unexpected tensor layers\.0\.input_layernorm\.weight"),
    "second-layer": (with_(EAGLE, layers__1__mlp__up_proj__weight=torch.ones(1)), r"unexpected tensor layers\.1"),
    "nan": (with_(EAGLE, fc__bias=torch.full((HIDDEN,), math.nan)), r"fc\.bias has values that are infinite or no num"),
    "shape": (with_(EAGLE, fc__weight=torch.ones(HIDDEN, HIDDEN)), r"fc\.weight has shape \[48, 48\].*\[48, 96\]"),
    "integers": (with_(EAGLE, fc__weight=torch.ones(HIDDEN, 2 * HIDDEN, dtype=torch.int64)), r"fc\.weight has type"),
    "twice": (with_(EAGLE, model__fc__weight=torch.ones(HIDDEN, 2 * HIDDEN)), r"fc\.weight.* are the same"),
    "no-d2t": (without(EAGLE3, "d2t", "t2d"), "missing tensor d2t"),
    "no-lm-head": (without(EAGLE3, "lm_head.weight"), r"missing tensor lm_head\.weight"),
    "no-norm": (without(EAGLE3, "norm.weight"), r"missing tensor norm\.weight"),
    "short-d2t": (with_(EAGLE3, d2t=OFFSETS[:-1]), r"d2t has shape \[79\]"),
    "d2t-outside": (with_(EAGLE3, d2t=OFFSETS + VOCAB), "d2t does not map 80 rows"),
    "d2t-twice": (with_(EAGLE3, d2t=-torch.arange(80)), "d2t does not map 80 rows"),
    "depth": (with_(EAGLE3, {"num_hidden_layers": 2}), r"missing tensor layers\.1"),
    "t2d": (with_(EAGLE3, t2d=torch.ones(VOCAB, dtype=torch.bool)), "d2t and t2d contradict"),
    "hidden-size": (with_(EAGLE, {"hidden_size": 96}), "hidden_size: the head's is 96, the target's 48"),
    "target-hidden-size": (with_(EAGLE3, {"target_hidden_size": 64}), "target_hidden_size: the head's is 64"),
    "vocabulary": (with_(EAGLE, {"vocab_size": 100}), "vocab_size: the head's is 100, the target's 128"),
    "norms": (with_(EAGLE, {"layernorms": True}), "layernorms"),
    "epsilon": (with_(EAGLE, {"rms_norm_eps": -1.0}), "rms_norm_eps must not be negative"),
    "layer-types": (with_(EAGLE, {"layer_types": 1}), "layer_types must be a list of names"),
    "layers": (with_(EAGLE3, {"num_hidden_layers": 10**6}), "num_hidden_layers must be at most"),
    "flag": (with_(EAGLE3, {"norm_output": "false"}), "norm_output must be true or false"),
    "block-flag": (with_(DSPARK, {"sample_from_anchor": "no"}), "sample_from_anchor must be true or false"),
    "block-layers": (with_(DSPARK, {"num_hidden_layers": None}), "num_hidden_layers is missing"),
    "layer-config": (with_(speculators(EAGLE3), {"transformer_layer_config": [1]}), "'eagle3' with None layers"),
    "layer-model": (with_(speculators(EAGLE3), {"speculators_model_type": ["eagle3"]}), r"type \['eagle3'\]"),
    "architectures": (with_(EAGLE, {"architectures": ["a", "b"]}), r"\['a', 'b'\] is not a draft head"),
    "activation": (with_(EAGLE, {"hidden_act": "relu"}), "activation 'relu'"),
    "embedding": (with_(EAGLE, embed_tokens__weight=torch.ones(9, HIDDEN)), r"embed_tokens\.weight has shape \[9"),
    "no-mtp-norm": (without(MTP, "model.mtp_layers.0.final_layernorm.weight"), "missing tensor mtp_layers"),
    "mtp-second": (with_(MTP, {"num_nextn_predict_layers": 2}), r"missing tensor mtp_layers\.1\.final_layernorm"),
    "mtp-unknown": (with_(MTP, model__mtp_layers__1__x=torch.ones(1)), r"unexpected tensor model\.mtp_layers\.1\.x"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_exactly_is_named(wrong: str, target: Path, tmp_path: Path) -> None:
    tiny, message = WRONG[wrong]
    with pytest.raises(CheckpointError, match=message):
        load(save_head(tiny, tmp_path), tiny.algorithm, target)


@pytest.mark.parametrize(
    ("head", "algorithm", "message"),
    [
        (EAGLE, "EAGLE3", "a head for --speculative-algorithm EAGLE, not EAGLE3"),
        (EAGLE3, "EAGLE", "a head for --speculative-algorithm EAGLE3, not EAGLE"),
        (with_(EAGLE3, {"architectures": ["LlamaForCausalLM"]}), "EAGLE", "EAGLE3, not EAGLE"),
        (MTP, "EAGLE", "a head for --speculative-algorithm MTP, not EAGLE"),
        (with_(MTP, {"architectures": ["GPT2LMHeadModel"]}), "MTP", "'GPT2LMHeadModel' is not a"),
        (speculators(EAGLE3, speculators_model_type="hydra"), "EAGLE3", "'hydra'"),
    ],
)
def test_another_kind_of_head_is_refused(
    head: TinyHead, algorithm: str, message: str, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(save_head(head, tmp_path), algorithm, target)


def test_no_weights_no_head(target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EAGLE.config))
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        load(tmp_path, "EAGLE", target)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        load(tmp_path, "EAGLE", target)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code has run",))


@pytest.mark.parametrize("content", ["code", "list", "nothing"])
def test_a_pickle_runs_no_code(
    content: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_head(EAGLE, tmp_path, file="pytorch_model.bin")
    file = tmp_path / "pytorch_model.bin"
    if content == "code":
        file.write_bytes(pickle.dumps({"fc.weight": Evil()}, protocol=2))
    elif content == "list":
        torch.save([1, 2], file)
    else:
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load(tmp_path, "EAGLE", target)
    assert "code has run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [[], [1, 1], [128], [-1], [1.5], "text", {"a": 1}, [[1, 2]], Evil()]
)
def test_a_broken_token_map_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "map.pt")
    with pytest.raises(CheckpointError, match=r"map\.pt") as refused:
        read_token_map(tmp_path / "map.pt", VOCAB)
    assert "weights_only" not in str(refused.value)
    if not isinstance(content, Evil):
        (tmp_path / "map.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"map\.json"):
            read_token_map(tmp_path / "map.json", VOCAB)
    with pytest.raises(CheckpointError, match="nowhere"):
        read_token_map(tmp_path / "nowhere", VOCAB)


def test_an_eagle_head_is_not_a_whole_model(target: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing tensor .*fc\.weight.*unexpected tensor"):
        load(target, "EAGLE", target)
