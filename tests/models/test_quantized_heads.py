"""Quantised draft heads in every format against the heads that they stand for; what is not read is
named before anything loads.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_service.models.draft_head import DraftHead
from draft_service.models.head_forms import HeadForms
from draft_service.steps.head_runner import HeadRunner
from foredraft.attention.cpu import CpuAttention
from foredraft.errors import CheckpointError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.linear import Float32CpuMethod, Linear
from foredraft.layers.quantized import ExpandedMethod
from foredraft.layers.quantized_cpu import TiledMethod
from foredraft.models.head_config import HeadConfig
from foredraft.runner.batch import SequenceRows
from testing.checkpoints import make_checkpoint
from testing.draft_heads import HeadReference, TinyHead, save_head, tiny_head
from testing.loaded_heads import CPU, load, speculators
from testing.quantized_checkpoints import FORMATS, Format
from testing.quantized_heads import quantized
from testing.tools import ROOT

HEADS = {
    "eagle": tiny_head("EAGLE", 1),
    "eagle-qwen2": tiny_head("EAGLE", 3, architecture="Qwen2ForCausalLMEagle", num_layers=2),
    "eagle3": tiny_head("EAGLE3", 5),
    "eagle3-last-state": tiny_head(
        "EAGLE3", 6, num_aux_hidden_states=1, eagle_config={"use_aux_hidden_state": False}
    ),
    "mtp": tiny_head("MTP", 13),
}
# Widths of 48 are no whole groups; the bundled head has those.
FORMS = (
    "fp8-block",
    "fp8-tensor",
    "float-channel",
    "int8",
    "awq-channel",
    "gptq-channel",
    "packed-channel",
)
EAGLE3, PACKED = HEADS["eagle3"], FORMATS["packed-channel"]
BUNDLED, BUNDLED_HEAD = ROOT / "models/foredraft-demo", ROOT / "models/foredraft-demo-eagle3"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5)


@torch.inference_mode()
def outputs(head: DraftHead, tokens: list[int], hidden: torch.Tensor) -> tuple[Any, Any]:
    """Logits and features of one forward over all of a text."""
    kv = PagedKV.for_model(head.config.layer, 8, 4, torch.float32, CPU)
    runner = HeadRunner(head, kv, CpuAttention())
    rows = SequenceRows.chunk(range(8), 0, tokens, "all")
    out = runner.forward([rows], runner.fuse(hidden))
    return out.logits, out.features


def text(width: int) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(128, (9,), generator=generator).tolist()
    return tokens, torch.randn(9, width, generator=generator)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("form", FORMS)
def test_a_head_computes_with_the_weights_that_its_files_stand_for(
    kind: str, form: str, target: Path, tmp_path: Path
) -> None:
    stored, meant = quantized(HEADS[kind], FORMATS[form])
    head = load(save_head(stored, tmp_path), stored.algorithm, target)
    tokens, hidden = text(stored.width)
    logits, features = outputs(head, tokens, hidden)
    reference = HeadReference(meant, target)
    state = reference.empty
    for position, token in enumerate(tokens):
        feature = reference.fused(hidden[position].double().numpy())
        step = reference.row(state, token, feature, position)
        state = step.state
        np.testing.assert_allclose(logits[position], step.logits, atol=2e-4)
        np.testing.assert_allclose(features[position], step.feature, atol=2e-4)
    methods = {type(one.method) for one in own_linears(head)}
    assert methods == ({Float32CpuMethod} if "fp8" in form or "float" in form else {TiledMethod})


def own_linears(head: DraftHead) -> list[Linear]:
    return [one for one in head.modules() if isinstance(one, Linear) and one is not head.lm_head]


@pytest.mark.parametrize(
    "form", ["packed-32", "packed-64", "awq-64", "gptq-sym", "gptq-order", "fp8-block"]
)
def test_groups_of_the_bundled_head(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As stored, and in the form that GPUs keep."""
    raw = json.loads((BUNDLED_HEAD / "config.json").read_text())
    bundled = TinyHead("EAGLE3", raw, load_file(BUNDLED_HEAD / "model.safetensors"), 3)
    stored, meant = quantized(bundled, FORMATS[form])
    as_stored, as_plain = tmp_path / "stored", tmp_path / "plain"
    save_head(stored, as_stored)
    save_head(meant, as_plain)
    plain = load(as_plain, "EAGLE3", BUNDLED)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(8192, (9,), generator=generator).tolist()
    hidden = torch.randn(9, plain.hidden_width, generator=generator)
    wanted = outputs(plain, tokens, hidden)
    for is_expanded in (False, True):
        if is_expanded:
            monkeypatch.setattr("foredraft.layers.quantized.StoredMethod", ExpandedMethod)
        head = load(as_stored, "EAGLE3", BUNDLED)
        kept = TiledMethod if form[:3] != "fp8" and not is_expanded else Float32CpuMethod
        for linear in own_linears(head):
            method = getattr(linear.method, "_method", linear.method)  # behind an act-order
            assert isinstance(method, kept)
        for got, want in zip(outputs(head, tokens, hidden), wanted, strict=True):
            assert float((got - want).norm() / want.norm()) < 1e-5


def test_the_tools_own_files(target: Path, tmp_path: Path) -> None:
    """compressed-tensors compresses a head of the speculators library, and gives it back."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    weights = quantization.QuantizationArgs(num_bits=4, strategy="channel", symmetric=True)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = packing.PackedQuantizationCompressor

    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        own = {
            "weight": weight.float(),
            "weight_scale": weight.abs().amax(1, keepdim=True).float() / 7,
        }
        packed = compressor.compress(own, scheme)
        return packed, compressor.decompress(packed, scheme)["weight"].double()

    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized",
        ignore=["lm_head"],
        quantization_status="compressed",
    ).to_dict()
    stored, meant = quantized(speculators(EAGLE3), Format(config, pack))
    head = load(save_head(stored, tmp_path), "EAGLE3", target)
    tokens, hidden = text(stored.width)
    reference = HeadReference(TinyHead("EAGLE3", EAGLE3.config, meant.tensors, 3), target)
    step = reference.row(reference.empty, tokens[0], reference.fused(hidden[0].double().numpy()), 0)
    np.testing.assert_allclose(outputs(head, tokens, hidden)[0][0], step.logits, atol=2e-4)


def test_matrices_that_a_tool_left_plain_are_read_as_they_are(target: Path, tmp_path: Path) -> None:
    """AWQ and GPTQ leave all but the layers plain, and name nothing."""
    stored, meant = quantized(EAGLE3, PACKED, lambda name: "fc." in name or "mlp" in name)
    head = load(save_head(stored, tmp_path), "EAGLE3", target)
    tokens, hidden = text(stored.width)
    reference = HeadReference(meant, target)
    step = reference.row(reference.empty, tokens[0], reference.fused(hidden[0].double().numpy()), 0)
    np.testing.assert_allclose(outputs(head, tokens, hidden)[0][0], step.logits, atol=2e-4)
    kinds = [type(linear.method).__name__ for linear in own_linears(head)]
    assert sorted(kinds) == ["Float32CpuMethod"] * 3 + ["TiledMethod"] * 2


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_scales_of_a_cache_and_the_targets_lm_head_are_passed_over(
    file: str, target: Path, tmp_path: Path
) -> None:
    stored, _ = quantized(HEADS["eagle"], PACKED)
    tokens, hidden = text(stored.width)
    alone = load(save_head(stored, tmp_path / "alone"), "EAGLE", target)
    stored.tensors["layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)
    stored.tensors["lm_head.weight_packed"] = torch.ones(2, 2, dtype=torch.int32)
    stored.tensors["lm_head.weight_scale"] = torch.ones(1)
    head = load(save_head(stored, tmp_path / "more", file=file), "EAGLE", target)
    assert torch.equal(outputs(head, tokens, hidden)[0], outputs(alone, tokens, hidden)[0])


def test_what_a_config_says_of_its_target_does_not_make_a_plain_head_quantised(
    target: Path, tmp_path: Path
) -> None:
    config = EAGLE3.config | {"quantization_config": {"quant_method": "mxfp4"}}
    path = save_head(TinyHead("EAGLE3", config, EAGLE3.tensors, 3), tmp_path)
    assert HeadConfig.from_dir(path, "EAGLE3").layer.quantization is None
    head = load(path, "EAGLE3", target)
    assert {type(one.method) for one in own_linears(head)} == {Float32CpuMethod}


def test_mtp_layers_in_a_quantised_target(tmp_path: Path) -> None:
    """They are plain or quantised as the file has them, whatever the rest is."""
    mtp = HEADS["mtp"]
    base = make_checkpoint(tmp_path / "base", "Qwen2ForCausalLM", seed=6, num_hidden_layers=2)
    raw = json.loads((base / "config.json").read_text())
    raw |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    raw |= {"num_nextn_predict_layers": 1, "quantization_config": PACKED.config}
    raw |= {key: mtp.config[key] for key in ("head_dim", "intermediate_size", "rms_norm_eps")}
    raw |= {"rope_theta": 10000.0, "rope_parameters": None}
    layers, _ = quantized(
        TinyHead("EAGLE", {}, load_file(base / "model.safetensors")), FORMATS["packed-channel"]
    )
    stored, meant = quantized(mtp, PACKED)
    tokens, hidden = text(stored.width)
    reference = HeadReference(meant, base)
    step = reference.row(reference.empty, tokens[0], hidden[0].double().numpy(), 0)
    for name, tensors, method in (
        ("quantised", stored.tensors, TiledMethod),
        ("plain", {name: one.float() for name, one in meant.tensors.items()}, Float32CpuMethod),
    ):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(raw))
        save_file(layers.tensors | tensors, path / "model.safetensors")
        head = load(path, "MTP", path)
        assert {type(one.method) for one in own_linears(head)} == {method}
        np.testing.assert_allclose(outputs(head, tokens, hidden)[0][0], step.logits, atol=2e-4)


def with_tensors(head: TinyHead, **tensors: torch.Tensor | None) -> TinyHead:
    named = {name.replace("__", "."): one for name, one in tensors.items()}
    kept = {name: one for name, one in (head.tensors | named).items() if one is not None}
    return TinyHead(head.algorithm, head.config, kept, head.num_streams)


QUANTIZED = quantized(EAGLE3, PACKED)[0]
REFUSED: dict[str, tuple[TinyHead, str]] = {
    "lm_head": (
        with_tensors(QUANTIZED, lm_head__weight_scale=torch.ones(80, 1)),
        r"quantised lm_head is not supported: compressed-tensors int4 \(one scale an output\)"
        r".*leave the named ones out",
    ),
    "embedding": (
        with_tensors(QUANTIZED, embed_tokens__weight_scale=torch.ones(128, 1)),
        r"quantised embed_tokens is not supported",
    ),
    "one qkv": (
        with_tensors(QUANTIZED, midlayer__self_attn__qkv_proj__weight_scale=torch.ones(96, 1)),
        r"quantised layers\.0\.self_attn\.qkv_proj is not supported",
    ),
    "some of qkv": (
        quantized(EAGLE3, PACKED, lambda name: "v_proj" in name)[0],
        r"v_proj is plain and the rest of .* quantised.*mixed schemes",
    ),
    "no scale": (
        with_tensors(quantized(EAGLE3, FORMATS["float-channel"])[0], fc__weight_scale=None),
        r"tensor fc\.weight has type torch\.float8_e4m3fn, config\.json asks for torch\.float32",
    ),
    "no numbers": (
        with_tensors(QUANTIZED, midlayer__mlp__up_proj__weight_packed=None),
        r"missing tensor layers\.0\.mlp\.up_proj\.weight_packed",
    ),
    "shape": (
        with_tensors(QUANTIZED, fc__weight_scale=torch.ones(3, 1)),
        r"fc\.weight_scale has shape \[3, 1\]",
    ),
    "format": (
        TinyHead(
            "EAGLE3",
            EAGLE3.config | {"quantization_config": {"quant_method": "mxfp4"}},
            QUANTIZED.tensors,
            3,
        ),
        r"\(mxfp4\) are not supported; .*--speculative-draft-model-quantization",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_read_is_named(kind: str, target: Path, tmp_path: Path) -> None:
    head, message = REFUSED[kind]
    with pytest.raises(CheckpointError, match=message):
        load(save_head(head, tmp_path), "EAGLE3", target)


def test_a_quantised_head_of_made_up_weights(target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QUANTIZED.config))
    head = load(tmp_path, "EAGLE3", target, load_format="dummy")
    tokens, hidden = text(QUANTIZED.width)
    assert torch.isfinite(outputs(head, tokens, hidden)[0]).all()
    assert {type(one.method) for one in own_linears(head)} == {TiledMethod}


def test_a_gpu_keeps_the_weights_that_a_quantised_matrix_stands_for() -> None:
    quantization = HeadConfig.from_dict(QUANTIZED.config, "EAGLE3").layer.quantization
    for device, method in (("cpu", "StoredMethod"), ("cuda", "ExpandedMethod")):
        forms = HeadForms(quantization, {"fc.weight_scale": (48, 1)}, torch.device(device))
        assert type(forms.of("")(["fc"])).__name__ == method
        assert forms.of("")(["other"]) is None
