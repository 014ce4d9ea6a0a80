"""Turns a GGUF file into a Hugging Face directory: `python -m foredraft.models.gguf_convert SOURCE
TARGET`.

Runs as a process of its own, started by `registry`, so that the memory that transformers takes is
given back.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import CheckpointError
from foredraft.models.loader import available_host_bytes

if TYPE_CHECKING:
    import torch

_BLOCK = 32  # inputs that share a scale in the types below
_BITS = {"Q8_0": 8, "Q4_0": 4}


def convert(source: Path, target: Path) -> None:
    """Writes config, tokenizer and weights of `source` to the directory `target`.

    Weights become bfloat16, but for files whose layers are all Q8_0 or all Q4_0: their numbers and
    scales stay as they are, in compressed-tensors' form, and so do those of embedding and LM head
    where they have that type; the rest is float32.

    Raises:
        CheckpointError: transformers cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        bits = _bits_of_layers(source)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        # Packed GGUF weights cannot be saved again; dequantized ones can.
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32 if bits else torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    except (ImportError, OSError, ValueError, KeyError, NotImplementedError) as error:
        raise CheckpointError(f"{source}: transformers cannot read it: {error}") from error
    tokenizer.save_pretrained(target)
    packed = _pack_layers(model.state_dict(), bits) if bits else None
    if packed is None:
        model.to(torch.bfloat16).save_pretrained(target)
    else:
        _save(model, packed, bits, target)


def _bits_of_layers(source: Path) -> int:
    """Returns how many bits the numbers of all matrices of layers have; 0 where they are of other
    types, or where the float32 weights that they are read by do not fit in memory.
    """
    from gguf import GGUFReader

    tensors = GGUFReader(source).tensors
    matrices = [one for one in tensors if one.name.startswith("blk.") and len(one.shape) > 1]
    kinds = {one.tensor_type.name for one in matrices}
    num_weights = sum(int(one.n_elements) for one in tensors)
    fits = 5 * num_weights < available_host_bytes()
    return _BITS.get(kinds.pop(), 0) if len(kinds) == 1 and fits else 0


def _pack_layers(tensors: "dict[str, torch.Tensor]", bits: int) -> "dict[str, torch.Tensor] | None":
    """Returns a checkpoint with the matrices of layers packed, and embedding and LM head where both
    can be; None where a layer's matrix is not what blocks of so many bits stand for.
    """
    import torch

    found = {}
    packed = {
        name: _blocks(tensor, bits) if tensor.dim() == 2 else None
        for name, tensor in tensors.items()
        if tensor.dim() > 1
    }
    if not all(packed[name] for name in packed if ".layers." in name):
        return None
    has_vocabulary = all(packed.values())
    for name, tensor in tensors.items():
        parts = packed.get(name)
        if parts is None or not (has_vocabulary or ".layers." in name):
            found[name] = tensor.contiguous()
            continue
        stem = name.removesuffix("weight")
        found[f"{stem}weight_packed"], found[f"{stem}weight_scale"] = parts
        found[f"{stem}weight_shape"] = torch.tensor(tensor.shape)
    return found


def _blocks(weight: "torch.Tensor", bits: int) -> "tuple[torch.Tensor, torch.Tensor] | None":
    """Finds the numbers and scales that float32 weights [outputs, inputs] were made from.

    The largest number of a block is 127 or -127 in Q8_0 and -8 in Q4_0, which gives its scale.

    Returns:
        int32 [outputs, inputs * bits / 32], numbers plus half their range from the lowest bits,
        and float16 [outputs, inputs / 32]; None where the weights are not exactly their products.
    """
    import torch

    if weight.shape[1] % _BLOCK:
        return None
    values = weight.view(len(weight), -1, _BLOCK)
    most = values.gather(2, values.abs().argmax(2, keepdim=True))
    scales = most.abs() / 127 if bits == 8 else most / -8
    numbers = torch.where(scales == 0, 0.0, values / scales).round_()
    half = 1 << (bits - 1)
    if (
        not torch.equal(scales.half().float(), scales)
        or not torch.equal(numbers * scales, values)
        or bool((numbers.abs() > half).any() or (numbers == half).any())
    ):
        return None
    unsigned = numbers.add_(half).to(torch.uint8).view(weight.shape)
    if bits == 4:
        unsigned = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    return unsigned.contiguous().view(torch.int32), scales.half().squeeze(2).contiguous()


def _save(model: Any, tensors: "dict[str, torch.Tensor]", bits: int, target: Path) -> None:
    from safetensors.torch import save_file

    if model.config.tie_word_embeddings:
        tensors = {name: one for name, one in tensors.items() if not name.startswith("lm_head.")}
    has_vocabulary = "model.embed_tokens.weight_packed" in tensors
    targets = ["Linear", "Embedding"] if has_vocabulary else ["Linear"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": _BLOCK}
    model.generation_config.save_pretrained(target)
    raw = json.loads(model.config.to_json_string(use_diff=False))
    raw["architectures"] = [type(model).__name__]
    raw["dtype"] = "bfloat16"  # of activations on a GPU
    raw["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": targets, "weights": weights}},
        "ignore": [] if has_vocabulary else ["lm_head"],
    }
    (target / "config.json").write_text(json.dumps(raw, indent=1))


def main() -> int:
    """Prints one line to standard error and returns 1 when the file cannot be converted."""
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
