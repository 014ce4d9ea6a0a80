"""Block drafters in every published layout of names and keys; what does not fit exactly is named,
and other kinds are refused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draft_service.models.block_draft import BlockDraft
from draft_service.models.peagle import PEagleHead
from foredraft.errors import CheckpointError
from foredraft.models.head_config import HeadConfig
from testing.block_drafts import MASK, RANK, tiny_block, tiny_peagle
from testing.checkpoints import make_checkpoint
from testing.draft_heads import HIDDEN, VOCAB, TinyHead, save_head
from testing.loaded_heads import load, renamed

DFLASH = tiny_block("DFLASH", 1)
DSPARK = tiny_block("DSPARK", 2, confidence="both")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5)


def changed(head: TinyHead, config: dict[str, Any] | None = None, **tensors: Any) -> TinyHead:
    """With other keys and tensors; None takes one away."""
    merged = dict(head.config)
    for key, value in (config or {}).items():
        if key == "dflash_config":
            value = {**merged.get(key, {}), **value}
            value = {name: part for name, part in value.items() if part is not None}
        merged[key] = value
    merged = {key: value for key, value in merged.items() if value is not None}
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in (head.tensors | named).items() if tensor is not None}
    return TinyHead(head.algorithm, merged, kept, head.num_streams)


def same(one: BlockDraft, other: BlockDraft) -> None:
    others = other.targets()
    for name, target in one.targets().items():
        assert torch.equal(target.memory, others[name].memory), name
    assert one.captured_layers == other.captured_layers
    assert one.options.num_drafted == other.options.num_drafted


def fused(head: TinyHead) -> TinyHead:
    """Queries, keys and values in one matrix."""
    tensors = dict(head.tensors)
    for index in range(head.config["num_hidden_layers"]):
        own = f"layers.{index}.self_attn."
        parts = [tensors.pop(f"{own}{part}_proj.weight") for part in "qkv"]
        tensors[f"{own}qkv_proj.weight"] = torch.cat(parts)
    return TinyHead(head.algorithm, head.config, tensors, head.num_streams)


LAYOUTS: dict[str, tuple[TinyHead, TinyHead]] = {
    "prefix": (DFLASH, renamed(DFLASH, ("", "model."))),
    "modelopt-names": (
        DSPARK,
        renamed(DSPARK, ("markov_head.", ""), ("confidence_head.proj.", "confidence_proj.")),
    ),
    "without-confidence": (
        DSPARK,
        changed(DSPARK, confidence_head__proj__weight=None, confidence_head__proj__bias=None),
    ),
    "block-size-inside": (
        DFLASH,
        changed(DFLASH, {"block_size": None, "dflash_config": {"block_size": 5}}),
    ),
    "wrong-architecture": (DSPARK, changed(DSPARK, {"architectures": ["Qwen3ForCausalLM"]})),
    "another-mask-key": (
        DFLASH,
        changed(DFLASH, {"dflash_config": {"mask_token_id": None}, "pard_token": MASK}),
    ),
    "copied-keys": (
        DFLASH,
        changed(DFLASH, {"num_experts": 128, "sliding_window": 4096, "max_window_layers": 36}),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_the_same_draft(layout: str, target: Path, tmp_path: Path) -> None:
    plain, written = LAYOUTS[layout]
    made = [
        load(save_head(head, tmp_path / name), plain.algorithm, target)
        for name, head in (("plain", plain), ("written", written))
    ]
    assert isinstance(made[0], BlockDraft)
    assert isinstance(made[1], BlockDraft)
    same(made[0], made[1])


def test_one_matrix_for_queries_keys_and_values(target: Path, tmp_path: Path) -> None:
    made = [
        load(save_head(head, tmp_path / str(number)), "DFLASH", target)
        for number, head in enumerate((DFLASH, fused(DFLASH)))
    ]
    for plain, other in zip(made[0].layers, made[1].layers, strict=True):  # type: ignore[attr-defined]
        assert torch.equal(plain.attention.qkv.weight, other.attention.qkv.weight)


def test_a_copy_of_the_targets_lm_head_takes_no_memory(target: Path, tmp_path: Path) -> None:
    weight = load_file(target / "model.safetensors")["lm_head.weight"]
    copy = load(
        save_head(changed(DFLASH, lm_head__weight=weight), tmp_path / "a"), "DFLASH", target
    )
    other = changed(DFLASH, lm_head__weight=weight + 1)
    own = load(save_head(other, tmp_path / "b"), "DFLASH", target)
    assert isinstance(copy, BlockDraft)
    plain = load(save_head(DFLASH, tmp_path / "c"), "DFLASH", target)
    assert torch.equal(copy.lm_head.weight, plain.lm_head.weight)
    assert torch.equal(own.lm_head.weight, weight + 1)


Layers = tuple[int, ...]


def layers_of(head: TinyHead, num_target_layers: int) -> Layers:
    return HeadConfig.from_dict(head.config).captured_layers(num_target_layers)


def test_the_target_layers_are_those_that_each_layout_means() -> None:
    # All but the speculators library count outputs: layer i's enters layer i + 1; -1 is the
    # embedding.
    ids = {"dflash_config": {"target_layer_ids": [-1, 3, 7]}}
    assert layers_of(changed(DFLASH, ids), 12) == (0, 4, 8)
    speculators = tiny_block("DFLASH", 1, layout="speculators")
    entering = {"aux_hidden_state_layer_ids": [2, 5, 9]}
    assert layers_of(changed(speculators, entering), 12) == (2, 5, 9)
    # Without any, z-lab's are spread evenly, as 1, 9, 17, 25, 33 for Qwen3-8B.
    absent = {"dflash_config": {"target_layer_ids": None}, "num_hidden_layers": 5}
    assert layers_of(changed(DFLASH, absent), 36) == (2, 10, 18, 26, 34)
    one = {"dflash_config": {"target_layer_ids": None}, "num_hidden_layers": 1}
    assert layers_of(changed(DFLASH, one), 36) == (19,)
    none = {"aux_hidden_state_layer_ids": None}
    assert layers_of(changed(speculators, none), 36) == (2, 18, 33)


REFUSED: dict[str, tuple[TinyHead, str]] = {
    "dflash2-name": (changed(DFLASH, {"architectures": ["DFlash2DraftModel"]}), "DFlash2 is not"),
    "dflash2-keys": (
        changed(DFLASH, {"dflash_config": {"conv_kernel_size": 2}}),
        "DFlash2 is not served; DFLASH, DSPARK and PEAGLE are",
    ),
    "dflash2-tensors": (
        changed(DFLASH, candidate_selector__successor_codebook=torch.ones(2, 2)),
        r"DFlash2 \(tensor candidate_selector\.successor_codebook\) is not served",
    ),
    "domino": (changed(DFLASH, {"dflash_config": {"projector_type": "domino"}}), "Domino is not"),
    "domino-tensors": (
        changed(DFLASH, prefix_gru__weight_hh_l0=torch.ones(2, 2)),
        r"Domino \(tensor prefix_gru",
    ),
    "gated-attention": (
        changed(DFLASH, layers__0__self_attn__g_proj__weight=torch.ones(2, 2)),
        "gated attention",
    ),
    "projector": (
        changed(DFLASH, {"dflash_config": {"projector_type": "lilicorr"}}),
        "projector_type 'lilicorr'",
    ),
    "markov-kind": (
        changed(DSPARK, {"dflash_config": {"markov_head_type": "fir"}}),
        "markov_head_type 'fir'",
    ),
    "no-mask": (
        changed(DFLASH, {"dflash_config": {"mask_token_id": None}}),
        "mask_token_id is missing",
    ),
    "mask-outside": (
        changed(DFLASH, {"dflash_config": {"mask_token_id": VOCAB}}),
        "mask_token_id 128 is not below vocab_size 128",
    ),
    "no-block": (changed(DFLASH, {"block_size": None}), "block_size must be at least 2"),
    "other-target": (changed(DFLASH, {"num_target_layers": 36}), "num_target_layers"),
    "layers-outside": (
        changed(DFLASH, {"dflash_config": {"target_layer_ids": [0, 9]}}),
        r"target_layer_ids.*3 layers",
    ),
    "fc-width": (
        changed(DFLASH, {"dflash_config": {"target_layer_ids": [0, 1, 2]}}),
        r"fc\.weight has shape \[48, 96\].*\[48, 144\]",
    ),
    "missing": (changed(DFLASH, hidden_norm__weight=None), r"missing tensor hidden_norm\.weight"),
    "unexpected": (changed(DFLASH, x__weight=torch.ones(1)), r"unexpected tensor x\.weight"),
    "half-a-markov-head": (
        changed(DSPARK, markov_head__markov_w2__weight=None),
        r"missing tensor markov_head\.markov_w2",
    ),
    "rank": (
        changed(DSPARK, {"dflash_config": {"markov_rank": RANK + 1}}),
        r"markov_w1\.weight has shape \[128, 6\]",
    ),
    "unknown-confidence": (
        changed(DSPARK, confidence_head__gate__weight=torch.ones(1)),
        r"unexpected tensor confidence_head\.gate\.weight",
    ),
    "nan": (changed(DFLASH, norm__weight=torch.full((HIDDEN,), torch.nan)), "infinite or no num"),
    "no-d2t": (changed(DFLASH, lm_head__weight=torch.ones(80, HIDDEN)), "missing tensor d2t"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_does_not_fit_exactly_is_named(wrong: str, target: Path, tmp_path: Path) -> None:
    head, message = REFUSED[wrong]
    with pytest.raises(CheckpointError, match=message):
        load(save_head(head, tmp_path), head.algorithm, target)


PEAGLE: dict[str, tuple[TinyHead, str]] = {
    "no-mask": (changed(tiny_peagle(1), {"mask_token_id": None}), "mask_token_id is missing"),
    "mask-outside": (changed(tiny_peagle(1), {"mask_token_id": 128}), "a token id below 128"),
    "no-row": (changed(tiny_peagle(1), mask_hidden=None), "missing tensor mask_hidden"),
    "width": (changed(tiny_peagle(1), mask_hidden=torch.ones(1, 1, 48)), r"\[1, 1, 48\]"),
}


@pytest.mark.parametrize("wrong", PEAGLE)
def test_peagle_is_read_exactly_too(wrong: str, target: Path, tmp_path: Path) -> None:
    head, message = PEAGLE[wrong]
    with pytest.raises(CheckpointError, match=message):
        load(save_head(head, tmp_path), "PEAGLE", target)


def test_peagle_as_the_speculators_library_writes_it(target: Path, tmp_path: Path) -> None:
    plain = tiny_peagle(3)
    layer = {**plain.config, "model_type": "llama"}
    config = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": layer,
        "draft_vocab_size": layer.pop("draft_vocab_size"),
        "mask_token_id": layer.pop("mask_token_id"),
        "eagle_aux_hidden_state_layer_ids": [2, 1, 0],
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]},
    }
    written = TinyHead("PEAGLE", config, plain.tensors, plain.num_streams)
    made = load(save_head(written, tmp_path), "PEAGLE", target)
    assert isinstance(made, PEagleHead)
    assert made.captured_layers == (2, 1, 0)
    assert made.config.num_drafted == 5
    assert torch.equal(made.mask_hidden, plain.tensors["mask_hidden"])
