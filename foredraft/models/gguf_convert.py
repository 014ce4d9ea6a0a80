"""Turns a GGUF file into a Hugging Face directory: `python -m foredraft.models.gguf_convert SOURCE
TARGET`.

Runs as a process of its own, started by `registry`, so that the memory that transformers takes is
given back.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import CheckpointError
from foredraft.layers.weight_scheme import GGUF_BLOCKS, GGUF_SCHEMES

if TYPE_CHECKING:
    import torch

# Classes by transformers' `model_type`.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_TABLES = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_SANDWICH_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"  # follow from the configuration


def convert(source: Path, target: Path) -> None:
    """Writes config, tokenizer and weights of `source` to the directory `target`.

    Matrices of the types that are computed with keep their blocks of quantised numbers, others
    become bfloat16, and plain tensors keep their type.

    Raises:
        CheckpointError: The file has tensors of a type or name that is not read, or transformers
            cannot read its configuration or tokenizer.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        if config.model_type not in _ARCHITECTURES:
            raise CheckpointError(f"{source}: models of type {config.model_type} are not supported")
        tensors, types = _read(source, config)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except (ImportError, OSError, ValueError, KeyError, NotImplementedError) as error:
        raise CheckpointError(f"{source}: transformers cannot read it: {error}") from error
    tokenizer.save_pretrained(target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(_raw_config(config, types), indent=1))


def _raw_config(config: Any, types: Mapping[str, str]) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "_model_name_or_path"):
        raw.pop(name, None)
    raw["architectures"] = [_ARCHITECTURES[config.model_type]]
    raw["dtype"] = "bfloat16"  # of activations on a GPU
    if types:
        raw["quantization_config"] = {"quant_method": "gguf", "types": types}
    return raw


def _read(source: Path, config: Any) -> "tuple[dict[str, torch.Tensor], dict[str, str]]":
    """Returns the tensors of a checkpoint, and the types of quantised matrices by name."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    found: dict[str, torch.Tensor] = {}
    types: dict[str, str] = {}
    for stored in GGUFReader(source).tensors:
        if stored.name == _ROPE_FACTORS:
            continue
        name, kind = _name_of(stored.name, config, source), stored.tensor_type.name
        shape = [int(size) for size in reversed(stored.shape)]
        values = torch.from_numpy(stored.data.copy())  # the file's own memory is read-only
        if kind in GGUF_SCHEMES and len(shape) == 2:
            stem = name.removesuffix(".weight")
            types[stem] = kind
            name = f"{stem}.weight_blocks"
            values = values.view(shape[0], -1, GGUF_BLOCKS[kind][1])
        elif kind == "BF16":
            values = values.view(torch.bfloat16).view(shape)
        elif kind not in ("F16", "F32"):
            try:
                values = torch.from_numpy(dequantize(stored.data, stored.tensor_type)).bfloat16()
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{source}: tensor {stored.name} has the unsupported type {kind}"
                ) from error
        if config.model_type in ("llama", "mistral"):
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            part = name.split(".")[-2]
            if part in heads:
                values = _in_halves(values, heads[part])
        if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            values = values - 1  # stored with the one that the model adds
        found[name] = values.contiguous()
    return found, types


def _in_halves(rows: "torch.Tensor", num_heads: int) -> "torch.Tensor":
    """Puts the rows of each head, pairs of a rotation side by side, in the order of Hugging Face:
    all first ones, then all second ones.
    """
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _name_of(name: str, config: Any, source: Path) -> str:
    """Returns the name of a tensor in Hugging Face's checkpoints."""
    parts = _PARTS | (_SANDWICH_NORMS if config.model_type == "gemma3_text" else {})
    stem, _, suffix = name.rpartition(".")
    if stem in _TABLES:
        return f"{_TABLES[stem]}.{suffix}"
    words = stem.split(".")
    if len(words) != 3 or words[0] != "blk" or words[2] not in parts:
        raise CheckpointError(f"{source}: unexpected tensor {name}")
    return f"model.layers.{words[1]}.{parts[words[2]]}.{suffix}"


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
