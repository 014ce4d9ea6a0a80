"""Decoders with a cache of 8-bit floats against transformers with such a cache, and the scales that
checkpoints bring.
"""

import json

import pytest
import safetensors.torch
import torch

from foredraft.attention.cpu import CpuAttention
from foredraft.attention.paged_triton import TritonAttention
from foredraft.errors import CheckpointError
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers import attention, fused
from foredraft.models.config import ModelConfig
from foredraft.models.kv_scales import read_scales
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner
from foredraft.trees.draft_tree import DraftTree, paths
from testing.rounding_cache import RoundingCache
from testing.triton_device import INTERPRETED, true_casts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = [(0.02, 0.5), (0.7, 0.03), (1.0, 2.0), (0.25, 0.25)]
PAGE_SIZE, NUM_PAGES = 4, 96


def make_runner(directory, dtype, attention):
    model = load_model(directory, torch.float32)
    scales = SCALES[: model.config.num_layers]
    kv = PagedKV.for_model(model.config, NUM_PAGES, PAGE_SIZE, dtype, "cpu", 0, scales)
    return ModelRunner(model, kv, attention)


def tokens_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


@torch.inference_mode()
def reference(model, tokens, dtype):
    cache = RoundingCache(model.config, dtype, SCALES)
    return model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0].float()


def close(got, want):
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama-bias", E4M3), ("mistral-window", E5M2), ("qwen3-window", E4M3), ("gemma3", E4M3)],
)
def test_no_row_sees_more_of_its_own_step_than_of_others(checkpoints, name, dtype):
    """Chunks, single rows and trees all read rounded keys, so a token's logits do not depend on how
    it was computed.
    """
    directory, model = checkpoints(name)
    compare(make_runner(directory, dtype, CpuAttention()), model, dtype)


@torch.inference_mode()
@pytest.mark.gpu
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_nor_with_the_kernels(checkpoints, monkeypatch):
    """The kernels that a GPU runs for writing and reading keys; tests/e2e/test_gpu_eight_bit.py is
    about the GPU itself.
    """
    true_casts(monkeypatch)
    monkeypatch.setattr(attention, "kernels_for", lambda *tensors: fused)
    directory, model = checkpoints("qwen3-window")
    compare(make_runner(directory, E4M3, TritonAttention()), model, E4M3)


def compare(runner, model, dtype):
    """Chunks, a tree, its accepted path and what follows, each against transformers' own
    forward.
    """
    tokens = tokens_of(30)
    pages = [9, 2, 3, 40, 41, 42, 43, 7, 8, 20]
    want = reference(model, tokens, dtype)
    exact = model(torch.tensor([tokens])).logits[0]
    assert float((want - exact).abs().max()) > 0.05, "rounding would not be seen"
    done, got = 0, []
    for size in (7, 1, 11, 1, 1, 1):
        chunk = SequenceRows.chunk(pages, done, tokens[done : done + size], "all")
        got.append(runner.forward([chunk]).logits)
        done += size
    close(torch.cat(got), want[:done])
    prefix = tokens[: done + 1]
    tree = DraftTree((5, 6, 7, 8, 9, 10, 11, 12), (-1, -1, 0, 1, 2, 2, 4, 1))
    output = runner.forward([SequenceRows.tree(pages, done, prefix[-1], tree)])
    for row, path in enumerate(paths(tree)):
        close(output.logits[row], reference(model, [*prefix, *path], dtype)[-1])
    runner.commit_paths([(pages, done, [0, 1, 3, 5, 7])])
    taken = [*prefix, 5, 7, 9, 11]
    output = runner.forward([SequenceRows.chunk(pages, len(taken), [33, 34], "all")])
    close(output.logits, reference(model, [*taken, 33, 34], dtype)[-2:])


def with_scales(source, directory, named):
    """A copy of a checkpoint with further tensors."""
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    tensors |= {f"model.layers.{name}": torch.tensor(value) for name, value in named.items()}
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    return directory


def test_a_checkpoints_scales(checkpoints, tmp_path):
    source, _ = checkpoints("llama")
    assert load_model(source).kv_scales.tolist() == [[1, 1]] * 3
    directory = with_scales(
        source,
        tmp_path,
        {
            "0.self_attn.k_proj.k_scale": 0.25,
            "0.self_attn.v_proj.v_scale": [0.5],
            "1.self_attn.kv_scale": 2.0,
            "2.self_attn.v_scale": [8.0],
        },
    )
    assert load_model(directory).kv_scales.tolist() == [[0.25, 0.5], [2, 2], [1, 8]]


@pytest.mark.parametrize(
    ("value", "message"),
    [(0.0, "not positive"), (float("nan"), "not positive"), ([1.0, 2.0], r"has shape \[2\]")],
)
def test_scales_that_cannot_be(checkpoints, tmp_path, value, message):
    directory = with_scales(checkpoints("llama")[0], tmp_path, {"1.self_attn.k_scale": value})
    with pytest.raises(CheckpointError, match=message):
        load_model(directory)


@pytest.mark.parametrize(
    ("quantization", "is_plain"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}, True),  # noqa: E501
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}, "format": "int-quantized",  # noqa: E501
          "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}}, False),  # noqa: E501
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, False),
    ],
)  # fmt: skip
def test_scales_of_keys_and_values_alone_are_no_quantized_weights(
    checkpoints, quantization, is_plain
):
    raw = json.loads((checkpoints("llama")[0] / "config.json").read_text())
    raw["quantization_config"] = quantization
    assert (ModelConfig.from_dict(raw).quantization is None) == is_plain


def test_a_file_of_scales(tmp_path):
    file = tmp_path / "scales.json"

    def write(by_layer):
        file.write_text(json.dumps({"kv_cache": {"scaling_factor": {"0": by_layer}}}))

    write({"1": 0.5, "0": 0.25})
    assert read_scales(str(file), 2).tolist() == [[0.25, 0.25], [0.5, 0.5]]
    with pytest.raises(CheckpointError, match=r"layers \[0, 1\]; the model has one and 3"):
        read_scales(str(file), 3)
    write({"0": -1.0})
    with pytest.raises(CheckpointError, match="not positive"):
        read_scales(str(file), 1)
    file.write_text("[]")
    with pytest.raises(CheckpointError, match="not a file of KV scales"):
        read_scales(str(file), 1)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_scales(str(tmp_path / "none"), 1)
