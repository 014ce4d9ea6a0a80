"""Tiny quantised checkpoints of every format, packed number by number as the formats'
specifications say.

Nothing here uses the reader: each packer writes what AutoAWQ, AutoGPTQ, compressed-tensors or a
trainer of FP8 models writes, and says in float64 which weights the file stands for.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
FP8 = torch.float8_e4m3fn
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs in an int32, from the lowest bits


@dataclass(frozen=True)
class Format:
    """A format of quantised checkpoints.

    Attributes:
        config: `quantization_config`.
        pack: float64 [outputs, inputs] -> tensors by the last part of their names, and the weights
            that they stand for.
    """

    config: dict[str, Any]
    pack: Pack


def tiny_llama(
    directory: Path,
    *,
    hidden_size: int = 128,
    intermediate_size: int = 256,
    vocab_size: int = 97,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Creates a Llama of two layers with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.save_pretrained(directory)
    return directory


def is_quantized(name: str) -> bool:
    """Returns whether a checkpoint's tensor is the weight of a linear layer in a decoder layer."""
    return name.endswith("_proj.weight")


def write(
    plain: Path,
    directory: Path,
    form: Format,
    keep: Callable[[str], bool] = lambda name: False,
    change: Mapping[str, torch.Tensor] | None = None,
    has_vocabulary: bool = False,
) -> Tensors:
    """Writes a plain checkpoint in a quantised format.

    Args:
        keep: Returns whether the linear layer of a weight stays plain.
        change: Tensors to add, or to put in place of others.
        has_vocabulary: Whether embedding and LM head are quantised too, as in GGUF files.

    Returns:
        The weights that the checkpoint stands for, float64, by their plain names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors: Tensors = {}
    meant: Tensors = {}
    stored: Tensors = {}
    for file in plain.glob("*.safetensors"):
        stored |= load_file(file)
    for name, weight in stored.items():
        is_table = has_vocabulary and name in _TABLES
        if not (is_quantized(name) or is_table) or keep(name):
            tensors[name], meant[name] = weight, weight.double()
            continue
        packed, meant[name] = form.pack(weight.double())
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
    save_file(tensors | dict(change or {}), directory / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = _with_tables(form.config) if has_vocabulary else form.config
    (directory / "config.json").write_text(json.dumps(raw))
    return meant


def _with_tables(config: dict[str, Any]) -> dict[str, Any]:
    group = config["config_groups"]["group_0"] | {"targets": ["Linear", "Embedding"]}
    return config | {"config_groups": {"group_0": group}, "ignore": []}


def reference(plain: Path, meant: Mapping[str, torch.Tensor]) -> LlamaForCausalLM:
    """Creates transformers' model in float64 with the weights that a quantised checkpoint
    stands for.
    """
    model = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float64)
    missing, unexpected = model.load_state_dict(dict(meant), strict=False)
    assert not missing
    assert not unexpected
    return model


def _by_groups(values: torch.Tensor, size: int) -> torch.Tensor:
    return values.reshape(len(values), -1, size)


def _asymmetric(weight: torch.Tensor, size: int, most: int) -> tuple[torch.Tensor, ...]:
    """Returns numbers 0 to `most`, float16 scales and zero points of groups, and their weights
    in float64.
    """
    groups = _by_groups(weight, size)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / most).half().double().clamp_min(1e-4)
    zeros = (-low / scales).round().clamp(0, most)
    numbers = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    meant = ((numbers - zeros[..., None]) * scales[..., None]).reshape(weight.shape)
    return numbers.reshape(weight.shape).long(), scales, zeros.long(), meant


def _symmetric(weight: torch.Tensor, size: int, bits: int) -> tuple[torch.Tensor, ...]:
    """Returns numbers around zero, float32 scales of groups, and their weights in float64."""
    most = (1 << (bits - 1)) - 1
    groups = _by_groups(weight, size)
    scales = (groups.abs().amax(2) / most).float().double()
    numbers = (groups / scales[..., None]).round().clamp(-most - 1, most)
    meant = (numbers * scales[..., None]).reshape(weight.shape)
    return numbers.reshape(weight.shape).long(), scales, meant


def into_words(
    numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Packs [rows, n] -> int32 [rows, n * bits / 32]; number `order[i]` of a word goes to its
    i-th bits from the lowest.
    """
    each = 32 // bits
    values = numbers.numpy().astype(np.uint64)
    words = np.zeros((len(values), values.shape[1] // each), np.uint64)
    for column in range(words.shape[1]):
        for place, which in enumerate(order or range(each)):
            words[:, column] |= values[:, column * each + which] << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def fp8(granularity: str) -> Pack:
    """Quantises to float8_e4m3fn by tensor, by output ("channel") or by blocks of 128 x 128."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        if granularity == "block":
            rows, columns = -(-outputs // 128), -(-inputs // 128)
            scales = torch.zeros(rows, columns)
            wide = torch.zeros(outputs, inputs, dtype=torch.float64)
            for row in range(rows):
                for column in range(columns):
                    block = (
                        slice(row * 128, row * 128 + 128),
                        slice(column * 128, column * 128 + 128),
                    )
                    scales[row, column] = weight[block].abs().max() / 448
                    wide[block] = scales[row, column].double()
        else:
            most = (
                weight.abs().amax(1, keepdim=True)
                if granularity == "channel"
                else weight.abs().max()
            )
            scales = (most / 448).float()
            wide = scales.double()
        numbers = (weight / wide).to(FP8)
        name = "weight_scale_inv" if granularity == "block" else "weight_scale"
        tensors = {"weight": numbers, name: scales}
        return tensors, numbers.double() * wide

    return pack


def with_input_scale(pack: Pack) -> Pack:
    """Adds a static scale of activations."""

    def packed(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, meant = pack(weight)
        return tensors | {"input_scale": torch.tensor(0.01)}, meant

    return packed


def with_input_zero_point(pack: Pack) -> Pack:
    """Adds the zero point of static activations that are not symmetric."""

    def packed(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, meant = pack(weight)
        return tensors | {"input_zero_point": torch.tensor([-3], dtype=torch.int8)}, meant

    return packed


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantises to int8 with a scale for each output."""
    numbers, scales, meant = _symmetric(weight, weight.shape[1], 8)
    return {"weight": numbers.to(torch.int8), "weight_scale": scales.float()}, meant


def awq(size: int = 128) -> Pack:
    """Packs AutoAWQ's gemm version; `size` -1 for a scale per output."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        each = size if size > 0 else weight.shape[1]
        numbers, scales, zeros, meant = _asymmetric(weight, each, 15)
        return {
            "qweight": into_words(numbers.t(), 4, AWQ_ORDER),
            "qzeros": into_words(zeros.t(), 4, AWQ_ORDER),
            "scales": scales.t().half(),
        }, meant

    return pack


def gptq(
    size: int = 128, bits: int = 4, order: bool = False, symmetric: bool = False, offset: int = 1
) -> Pack:
    """Packs AutoGPTQ's layout; `order` assigns inputs to random groups, as act-order assigns
    them by size.
    """

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        each, most = size if size > 0 else inputs, (1 << bits) - 1
        index = torch.arange(inputs) // each
        if order:
            # One Hessian, so one order, for all matrices that read the same x.
            index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(7))]
        place = torch.argsort(index, stable=True)
        if symmetric:
            numbers, scales, meant = _symmetric(weight[:, place], each, bits)
            scales = scales.half().double().clamp_min(1e-4)
            numbers = numbers + (1 << (bits - 1))
            zeros = torch.full_like(scales, 1 << (bits - 1)).long()
            meant = _by_groups(numbers.double() - (1 << (bits - 1)), each) * scales[..., None]
            meant = meant.reshape(weight.shape)
        else:
            numbers, scales, zeros, meant = _asymmetric(weight[:, place], each, most)
            # A stored zero point is one less, so it is 1 at least.
            shift = (offset - zeros).clamp_min(0)
            zeros = zeros + shift
            meant = _by_groups(numbers.double(), each) - zeros[..., None]
            meant = (meant * scales[..., None]).reshape(weight.shape)
        back = torch.argsort(place)
        tensors = {
            "qzeros": into_words((zeros - offset).t(), bits),
            "scales": scales.t().half(),
            "g_idx": index.int(),
        }
        tensors["qweight"] = into_words(numbers[:, back], bits).t()
        return tensors, meant[:, back]

    return pack


def packed(size: int, bits: int = 4, zeros: bool = False) -> Pack:
    """Packs compressed-tensors' pack-quantized; `size` -1 for a scale per output."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        each = size if size > 0 else inputs
        tensors: Tensors = {"weight_shape": torch.tensor([outputs, inputs])}
        if zeros:
            numbers, scales, points, meant = _asymmetric(weight, each, (1 << bits) - 1)
            tensors["weight_zero_point"] = into_words(points.t(), bits).t()
        else:
            numbers, scales, meant = _symmetric(weight, each, bits)
            numbers = numbers + (1 << (bits - 1))
        tensors["weight_packed"] = into_words(numbers, bits)
        tensors["weight_scale"] = scales.float()
        return tensors, meant

    return pack


def compressed(form: str, activations: Any = None, **weights: Any) -> dict[str, Any]:
    """Returns `quantization_config` in the form of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_BY_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
_SHIFTED = _STATIC | {"type": "int", "symmetric": False}
_AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}


def _grouped(size: int, bits: int = 4, symmetric: bool = True) -> dict[str, Any]:
    strategy = "group" if size > 0 else "channel"
    return compressed(
        "pack-quantized",
        num_bits=bits,
        type="int",
        strategy=strategy,
        group_size=size if size > 0 else None,
        symmetric=symmetric,
    )


FORMATS: dict[str, Format] = {
    "fp8-block": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8("block"),
    ),
    "fp8-tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static"}, with_input_scale(fp8("tensor"))
    ),
    "fbgemm": Format({"quant_method": "fbgemm_fp8"}, fp8("channel")),
    "float-static": Format(
        compressed("float-quantized", _STATIC, num_bits=8, type="float", strategy="tensor"),
        with_input_scale(fp8("tensor")),
    ),
    "float-channel": Format(
        compressed("float-quantized", _BY_TOKEN, num_bits=8, type="float", strategy="channel"),
        fp8("channel"),
    ),
    "modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        with_input_scale(fp8("tensor")),
    ),
    "awq": Format(_AWQ, awq()),
    "awq-64": Format(_AWQ | {"group_size": 64}, awq(64)),
    "awq-channel": Format(_AWQ | {"group_size": -1}, awq(-1)),
    "gptq": Format(_GPTQ, gptq()),
    "gptq-order": Format(_GPTQ | {"desc_act": True, "group_size": 32}, gptq(32, order=True)),
    "gptq-sym": Format(_GPTQ | {"sym": True, "group_size": 64}, gptq(64, symmetric=True)),
    "gptq-channel": Format(_GPTQ | {"group_size": -1}, gptq(-1)),
    "gptq-v2": Format(_GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(offset=0)),
    "gptq-v2-transformers": Format(_GPTQ | {"format": "gptq_v2"}, gptq(offset=0)),
    "gptq-int8": Format(_GPTQ | {"bits": 8}, gptq(bits=8)),
    "packed-32": Format(_grouped(32), packed(32)),
    "packed-64": Format(_grouped(64, symmetric=False), packed(64, zeros=True)),
    "packed-128": Format(_grouped(128), packed(128)),
    "packed-channel": Format(_grouped(-1), packed(-1)),
    "packed-int8-32": Format(_grouped(32, bits=8), packed(32, bits=8)),  # as of GGUF's Q8_0
    "packed-int8": Format(_grouped(128, bits=8), packed(128, bits=8)),
    "int8": Format(compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8),
    "int8-static": Format(
        compressed("int-quantized", _SHIFTED, num_bits=8, type="int", strategy="channel"),
        with_input_zero_point(with_input_scale(int8)),
    ),
}
