"""Draft heads: each forward against the papers' equations in float64, and each published layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_service.models.draft_head import DraftHead
from draft_service.models.head_loader import load_head
from draft_service.models.shared_weights import (
    load_shared_weights,
    read_token_map,
    reduce_vocabulary,
)
from draft_service.steps.head_runner import HeadRunner
from foredraft.attention.cpu import CpuAttention
from foredraft.errors import CheckpointError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.runner.batch import SequenceRows
from testing.checkpoints import make_checkpoint
from testing.draft_heads import HIDDEN, VOCAB, HeadReference, TinyHead, save_head, tiny_head
from testing.loaded_heads import CPU, load, renamed, speculators

PAGE = 4

EAGLE31 = {"fc_norm": True, "norm_before_fc": True, "norm_output": True}
KINDS: dict[str, TinyHead] = {
    "eagle": tiny_head("EAGLE", 1),
    "eagle-unbiased": tiny_head("EAGLE", 2, fc_bias=False, bias=False),
    "eagle-qwen2": tiny_head("EAGLE", 3, architecture="Qwen2ForCausalLMEagle"),
    "eagle-two-layers": tiny_head("EAGLE", 4, num_layers=2),
    "eagle3": tiny_head("EAGLE3", 5),
    "eagle3-whole-vocabulary": tiny_head("EAGLE3", 6, draft_vocab=VOCAB),
    "eagle3-targets-head": tiny_head("EAGLE3", 7, draft_vocab=None),
    "eagle3-biased": tiny_head("EAGLE3", 8, fc_bias=True, bias=True),
    "eagle3.1": tiny_head("EAGLE3", 9, **EAGLE31),
    "eagle3-qwen3": tiny_head(
        "EAGLE3", 10, architecture="Qwen3ForCausalLMEagle3", norm_before_residual=True
    ),
    "eagle3-two-layers": tiny_head("EAGLE3", 11, num_layers=2),
    "eagle3-two-streams": tiny_head(
        "EAGLE3",
        12,
        num_aux_hidden_states=2,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]},
    ),
    "mtp": tiny_head("MTP", 13),
    "mtp-three": tiny_head("MTP", 14, num_layers=3),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5)


@pytest.fixture(scope="module")
def tied_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tied"), "Qwen2ForCausalLM", seed=6)


def runner_of(head: DraftHead) -> HeadRunner:
    kv = PagedKV.for_model(head.config.layer, 16, PAGE, torch.float32, CPU)
    return HeadRunner(head, kv, CpuAttention())


def outputs(head: DraftHead, hidden: torch.Tensor, tokens: list[int]) -> tuple[Any, Any]:
    """Logits and features of one forward over all of a text."""
    rows = SequenceRows.chunk(range(8), 0, tokens, "all")
    runner = runner_of(head)
    out = runner.forward([rows], runner.fuse(hidden))
    return out.logits, out.features


def text(length: int, width: int, seed: int = 0) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (length,), generator=generator).tolist()
    return tokens, torch.randn(length, width, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_forward_equals_the_equations(
    kind: str, is_tied: bool, target: Path, tied_target: Path, tmp_path: Path
) -> None:
    tiny, model = KINDS[kind], tied_target if is_tied else target
    head = load(save_head(tiny, tmp_path), tiny.algorithm, model)
    assert head.hidden_width == tiny.width
    reference = HeadReference(tiny, model)
    tokens, hidden = text(11, tiny.width)
    # In two chunks: the second attends to what the first has written; pages are out of order.
    runner, pages = runner_of(head), [9, 2, 5, 0]
    features = runner.fuse(hidden)
    logits, following = [], []
    for start, end in ((0, 6), (6, 11)):
        rows = SequenceRows.chunk(pages, start, tokens[start:end], "all")
        out = runner.forward([rows], features[start:end])
        logits.append(out.logits)
        following.append(out.features)
    state = reference.empty
    for position in range(11):
        feature = reference.fused(hidden[position].double().numpy())
        step = reference.row(state, tokens[position], feature, position)
        state = step.state
        np.testing.assert_allclose(torch.cat(logits)[position], step.logits, atol=2e-4)
        np.testing.assert_allclose(torch.cat(following)[position], step.feature, atol=2e-4)
    columns = np.arange(len(reference.columns)) if head.token_map is None else head.token_map
    np.testing.assert_array_equal(columns, reference.columns)


def test_the_streams_are_those_that_the_layout_means(target: Path, tmp_path: Path) -> None:
    def layers(**options: Any) -> tuple[int, ...]:
        head = tiny_head("EAGLE3", 1, **options)
        return load(save_head(head, tmp_path), "EAGLE3", target).captured_layers

    assert layers() == (2, 1, 0)  # of a target of 3 layers
    ids = [0, 1, 2]
    assert layers(eagle_aux_hidden_state_layer_ids=ids) == (1, 2, 3)
    assert layers(eagle_config={"eagle_aux_hidden_state_layer_ids": ids}) == (1, 2, 3)
    with pytest.raises(CheckpointError, match=r"eagle_aux_hidden_state_layer_ids.*3 layers"):
        layers(eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    with pytest.raises(CheckpointError, match="num_aux_hidden_states is 4"):
        layers(num_aux_hidden_states=4)


EAGLE, EAGLE3, MTP = KINDS["eagle"], KINDS["eagle3"], KINDS["mtp"]
LEGACY = tuple((f"fc_norm.{i}.", f"aux_norm_{n}.") for i, n in enumerate(("low", "mid", "high")))
LAYOUTS: dict[str, tuple[TinyHead, TinyHead, str]] = {
    "eagle-model-prefix": (EAGLE, renamed(EAGLE, ("", "model.")), "model.safetensors"),
    "eagle-bin": (EAGLE, EAGLE, "pytorch_model.bin"),
    "eagle-plain-architecture": (
        EAGLE,
        TinyHead("EAGLE", {**EAGLE.config, "architectures": ["LlamaForCausalLM"]}, EAGLE.tensors),
        "model.safetensors",
    ),
    "eagle-speculators": (
        EAGLE,
        speculators(
            renamed(EAGLE, ("layers.0.", "transformer."), ("fc.", "fusion_fc.")), fusion_bias=True
        ),
        "model.safetensors",
    ),
    "eagle3-layers-0": (EAGLE3, renamed(EAGLE3, ("midlayer.", "layers.0.")), "model.safetensors"),
    "eagle3-model-prefix": (
        EAGLE3,
        renamed(EAGLE3, ("midlayer.", "model.midlayer."), ("fc.", "model.fc.")),
        "pytorch_model.bin",
    ),
    "eagle3-speculators": (
        EAGLE3,
        speculators(
            renamed(EAGLE3, ("midlayer.", "layers.0.")),
            eagle_aux_hidden_state_layer_ids=[2, 1, 0],
            norm_before_residual=False,
        ),
        "model.safetensors",
    ),
    "eagle3-speculators-two-layers": (
        KINDS["eagle3-two-layers"],
        speculators(
            renamed(
                KINDS["eagle3-two-layers"],
                ("midlayer.", "layers.0."),
                ("layers.1.hidden_norm", "layers.1.input_layernorm"),
            )
        ),
        "model.safetensors",
    ),
    "eagle3-depth-of-the-target": (
        EAGLE3,
        TinyHead("EAGLE3", {**EAGLE3.config, "num_hidden_layers": 3}, EAGLE3.tensors, 3),
        "pytorch_model.bin",
    ),
    "eagle3-keys-of-the-target": (
        EAGLE3,
        TinyHead(
            "EAGLE3",
            {**EAGLE3.config, "layer_types": ["full_attention"] * 3, "num_experts": 8},
            EAGLE3.tensors,
        ),
        "model.safetensors",
    ),
    "eagle3-model-optimizer": (
        EAGLE3,
        TinyHead(
            "EAGLE3",
            {**EAGLE3.config, "eagle_config": {"eagle_aux_hidden_state_layer_ids": []}},
            EAGLE3.tensors,
        ),
        "model.safetensors",
    ),
    "eagle3-draft-vocabulary-not-said": (
        EAGLE3,
        TinyHead("EAGLE3", {**EAGLE3.config, "draft_vocab_size": None}, EAGLE3.tensors),
        "model.safetensors",
    ),
    "eagle3-legacy-norms": (
        KINDS["eagle3.1"],
        renamed(KINDS["eagle3.1"], *LEGACY),
        "model.safetensors",
    ),
    "mtp-without-prefix": (MTP, renamed(MTP, ("model.", "")), "pytorch_model.bin"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_head(layout: str, target: Path, tmp_path: Path) -> None:
    plain, other, file = LAYOUTS[layout]
    tokens, hidden = text(9, plain.width)
    heads = [
        load(save_head(plain, tmp_path / "plain"), plain.algorithm, target),
        load(save_head(other, tmp_path / "other", file=file), plain.algorithm, target),
    ]
    assert heads[0].captured_layers == heads[1].captured_layers
    for first, second in zip(*(outputs(head, hidden, tokens) for head in heads), strict=True):
        assert torch.equal(first, second)


def test_biases_are_those_of_the_checkpoint(target: Path, tmp_path: Path) -> None:
    """EAGLE's own layers never have one behind attention; a key says whether queries, keys and
    values have.
    """
    biased = tiny_head("EAGLE", 3, architecture="Qwen2ForCausalLMEagle")
    plain = KINDS["eagle"]
    tokens, hidden = text(5, HIDDEN)
    expected = outputs(load(save_head(biased, tmp_path / "0"), "EAGLE", target), hidden, tokens)
    for index, keys in enumerate(({}, {"attention_bias": True}, {"qkv_bias": True}), 1):
        config = biased.config | {"architectures": ["LlamaForCausalLM"]} | keys
        tiny = TinyHead("EAGLE", config, biased.tensors)
        found = outputs(
            load(save_head(tiny, tmp_path / str(index)), "EAGLE", target), hidden, tokens
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    qwen2 = TinyHead("EAGLE", biased.config, plain.tensors)
    found = outputs(load(save_head(qwen2, tmp_path / "4"), "EAGLE", target), hidden, tokens)
    expected = outputs(load(save_head(plain, tmp_path / "5"), "EAGLE", target), hidden, tokens)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for index, (tiny, message) in enumerate(
        (
            (TinyHead("EAGLE", plain.config | {"qkv_bias": True}, plain.tensors), "missing"),
            (TinyHead("EAGLE", biased.config | {"qkv_bias": False}, biased.tensors), "unexpected"),
        ),
        6,
    ):
        with pytest.raises(CheckpointError, match=rf"{message} tensor .*k_proj\.bias"):
            load(save_head(tiny, tmp_path / str(index)), "EAGLE", target)


def test_a_head_in_several_files(target: Path, tmp_path: Path) -> None:
    tokens, hidden = text(5, EAGLE3.width)
    expected = outputs(load(save_head(EAGLE3, tmp_path / "one"), "EAGLE3", target), hidden, tokens)
    names = list(EAGLE3.tensors)
    for kind, extension in (("safetensors", "safetensors"), ("bin", "bin")):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(EAGLE3.config))
        weight_map = {}
        for i in range(2):
            part = {name: EAGLE3.tensors[name].contiguous() for name in names[i::2]}
            file = f"part-{i}.{extension}"
            save: Callable[..., None] = save_file if kind == "safetensors" else torch.save
            save(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        stem = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
        (folder / f"{stem}.index.json").write_text(json.dumps({"weight_map": weight_map}))
        found = outputs(load(folder, "EAGLE3", target), hidden, tokens)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_mtp_layers_in_the_targets_checkpoint(tied_target: Path, tmp_path: Path) -> None:
    tiny = KINDS["mtp-three"]
    config = json.loads((tied_target / "config.json").read_text())
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 3,
    }
    sizes = {key: tiny.config[key] for key in ("head_dim", "intermediate_size", "rms_norm_eps")}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    tensors = load_file(tied_target / "model.safetensors") | tiny.tensors
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    tokens, hidden = text(7, HIDDEN)
    apart = load(save_head(tiny, tmp_path / "head"), "MTP", tied_target)
    inside = load(tmp_path, "MTP", tmp_path)
    assert apart.num_modules == inside.num_modules == 1
    for a, b in zip(outputs(apart, hidden, tokens), outputs(inside, hidden, tokens), strict=True):
        assert torch.equal(a, b)
    assert load(tmp_path, "MTP", tmp_path, multi_layer=True).num_modules == 3


def test_an_embedding_of_its_own_is_used_and_a_copy_is_not_kept(
    target: Path, tmp_path: Path
) -> None:
    shared = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    tokens, hidden = text(6, EAGLE3.width)
    for name, table in (("copy", shared), ("own", shared + 1)):
        tensors = EAGLE3.tensors | {"embed_tokens.weight": table}
        tiny = TinyHead("EAGLE3", EAGLE3.config, tensors, 3)
        head = load(save_head(tiny, tmp_path / name), "EAGLE3", target)
        reference = HeadReference(tiny, target)
        feature = reference.fused(hidden[0].double().numpy())
        step = reference.row(reference.empty, tokens[0], feature, 0)
        np.testing.assert_allclose(outputs(head, hidden, tokens)[0][0], step.logits, atol=2e-4)
    config = ModelConfig.from_dir(target)
    weights = load_shared_weights(target, config, torch.float32, CPU)
    head = load_head(tmp_path / "copy", "EAGLE3", config, weights, torch.float32, CPU)
    assert head.embedding is weights.embedding
    head = load_head(tmp_path / "own", "EAGLE3", config, weights, torch.float32, CPU)
    assert head.embedding is not weights.embedding


def test_a_copy_of_the_targets_lm_head_is_passed_over(target: Path, tmp_path: Path) -> None:
    tensors = EAGLE.tensors | {
        "lm_head.weight": torch.zeros(VOCAB, HIDDEN),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
    }
    tiny = TinyHead("EAGLE", EAGLE.config, tensors)
    head = load(save_head(tiny, tmp_path), "EAGLE", target)
    assert head.lm_head.weight.abs().sum() > 0


def test_shared_weights_of_the_files_type_are_mapped(target: Path) -> None:
    config = ModelConfig.from_dir(target)
    stored = load_file(target / "model.safetensors")
    mapped = load_shared_weights(target, config, torch.float32, CPU)
    converted = load_shared_weights(target, config, torch.bfloat16, CPU)
    for name, module in (
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "lm_head"),
    ):
        assert torch.equal(getattr(mapped, module).weight, stored[name])
        assert torch.equal(getattr(converted, module).weight, stored[name].bfloat16())
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert any(line.endswith(str(target / "model.safetensors")) for line in lines)


def test_dummy_heads_need_no_weights_and_leave_the_targets_alone(
    target: Path, tmp_path: Path
) -> None:
    stored = load_file(target / "model.safetensors")
    for kind, tiny in KINDS.items():
        (tmp_path / "config.json").write_text(json.dumps(tiny.config))
        head = load(tmp_path, tiny.algorithm, target, load_format="dummy")
        tokens, hidden = text(5, tiny.width)
        assert torch.isfinite(outputs(head, hidden, tokens)[0]).all(), kind
        assert torch.equal(head.embedding.weight, stored["model.embed_tokens.weight"])


def test_a_reduced_vocabulary(target: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_dir(target)
    shared = load_shared_weights(target, config, torch.float32, CPU)
    ids = [5, 0, 127, 64]
    torch.save(ids, tmp_path / "map.pt")
    save_file({"token_map": torch.tensor(ids)}, tmp_path / "map.safetensors")
    (tmp_path / "map.json").write_text(json.dumps(ids))
    for name in ("map.pt", "map.safetensors", "map.json"):
        assert read_token_map(tmp_path / name, VOCAB).tolist() == ids
    whole = shared.lm_head
    reduced = reduce_vocabulary(whole, torch.tensor(ids), torch.float32)
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(reduced(x), whole(x)[:, ids])
    bundled = read_token_map("foredraft-demo-token-map", 8192)
    assert len(bundled) == len(bundled.unique()) > 1000
