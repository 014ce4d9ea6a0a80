"""Turns a GGUF file into a Hugging Face directory: `python -m foredraft.models.gguf_convert SOURCE
TARGET`.

Runs as a process of its own, started by `registry`, so that the memory that transformers takes is
given back.
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foredraft.errors import CheckpointError
from foredraft.layers.weight_scheme import GGUF_BLOCKS, GGUF_SCHEMES
from foredraft.models.gguf_text import KEYS, PREFIX, drop_foreign_tokens, follow_metadata

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

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
_ROPE_FACTORS = "rope_freqs.weight"  # divisors of the frequencies, float32 [head_dim / 2]
# Of all Llama 3 models; the file has no more than the divisors that follow from them.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_STRETCHED = ("linear", "yarn")
_SCALING_KEYS = frozenset({"type", "factor", "original_context_length", "finetuned"})
# Of yarn, by their names in config.json.
_YARN_LIMITS = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
# Numbers that change nothing; -1 stands for the usual one.
_NEUTRAL_SCALING = {"attn_factor": (1,), "yarn_attn_factor": (1,), "yarn_ext_factor": (1, -1)}
_END_TOKENS = ("eos", "eot", "eom")  # end of a sequence, of a turn, of a message
_GEMMA_27B_LAYERS = 62
_FACTOR_TOLERANCE = 1e-4  # relative, of divisors


def convert(source: Path, target: Path) -> None:
    """Writes config, tokenizer and weights of `source` to the directory `target`.

    Matrices of the types that are computed with keep their blocks of quantised numbers, others
    become bfloat16, and plain tensors keep their type.

    Raises:
        CheckpointError: The file is broken or a part of one, has tensors of a type or name that is
            not read, or splits text or stretches rotary embeddings in a way that is not known, or
            transformers cannot read its configuration or tokenizer.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (OSError, ValueError, LookupError) as error:
        raise CheckpointError(f"{source}: broken, or cut off in a download: {error}") from error
    # These take seconds, for which a broken file need not wait.
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    try:
        if (num_parts := _field(reader, "split.count") or 1) > 1:
            raise CheckpointError(
                f"{source}: is one of {num_parts} parts, which are not read; llama-gguf-split"
                " --merge joins them"
            )
        config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        if config.model_type not in _ARCHITECTURES:
            raise CheckpointError(f"{source}: models of type {config.model_type} are not supported")
        tensors, types = _read(reader, config, source)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except (ImportError, OSError, ValueError, KeyError, NotImplementedError) as error:
        raise CheckpointError(f"{source}: transformers cannot read it: {error}") from error
    values = {key: _field(reader, f"{PREFIX}{key}") for key in KEYS}
    follow_metadata(tokenizer.backend_tokenizer, values, str(source))
    tokenizer.save_pretrained(target)
    drop_foreign_tokens(target / "tokenizer.json", len(reader.fields[f"{PREFIX}tokens"].data))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    raw = _raw_config(config, types)
    _add_metadata(raw, reader, source)
    _stretch(raw, reader, source)
    (target / "config.json").write_text(json.dumps(raw, indent=1))


def _raw_config(config: Any, types: Mapping[str, str]) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "_model_name_or_path"):
        raw.pop(name, None)
    raw["architectures"] = [_ARCHITECTURES[config.model_type]]
    raw["dtype"] = "bfloat16"  # of activations on a GPU
    if types:
        raw["quantization_config"] = {"quant_method": "gguf", "types": types}
    return raw


def _add_metadata(raw: dict[str, Any], reader: "GGUFReader", source: Path) -> None:
    """Writes what transformers passes over to a configuration: head sizes, Gemma's own numbers,
    and all tokens that end a text.

    Raises:
        CheckpointError: The file means arithmetic that is not computed.
    """
    architecture = _field(reader, "general.architecture")
    head_dim = _field(reader, f"{architecture}.attention.key_length") or raw.get("head_dim")
    head_dim = int(head_dim or raw["hidden_size"] // raw["num_attention_heads"])
    raw["head_dim"] = head_dim
    for name in ("attention.value_length", "rope.dimension_count"):
        other = _field(reader, f"{architecture}.{name}")
        if other not in (None, head_dim):
            raise CheckpointError(
                f"{source}: {architecture}.{name} {other} is not the head size {head_dim}, which is"
                " not supported"
            )
    if raw["model_type"] == "gemma3_text":
        _add_gemma(raw, reader, source, head_dim)
    ends = [_field(reader, f"tokenizer.ggml.{name}_token_id") for name in _END_TOKENS]
    known = {int(token) for token in ends if token is not None}
    if known := {token for token in known if 0 <= token < raw["vocab_size"]}:
        raw["eos_token_id"] = sorted(known)


def _add_gemma(raw: dict[str, Any], reader: "GGUFReader", source: Path, head_dim: int) -> None:
    """Does the part of `_add_metadata` for Gemma 3, as llama.cpp reads such files."""
    if _field(reader, "gemma3.attention.sliding_window") is None:
        raise CheckpointError(f"{source}: gemma3.attention.sliding_window is missing")
    if _field(reader, "gemma3.attention.sliding_window_pattern") not in (None, 6):
        raise CheckpointError(f"{source}: gemma3.attention.sliding_window_pattern is not 6")
    # The file says nothing of the scale of scores, which is another one for the largest model.
    is_27b = raw["num_hidden_layers"] == _GEMMA_27B_LAYERS
    scale = raw["hidden_size"] // raw["num_attention_heads"] if is_27b else head_dim
    raw["query_pre_attn_scalar"] = scale
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        raw[name] = _field(reader, f"gemma3.{name}")
    local = _field(reader, "gemma3.rope.freq_base_swa")
    if local is not None:
        raw["rope_parameters"]["sliding_attention"]["rope_theta"] = float(local)


def _stretch(raw: dict[str, Any], reader: "GGUFReader", source: Path) -> None:
    """Writes what the file says of stretched rotary embeddings to a configuration, which
    transformers passes over.

    Args:
        raw: Configuration of the model, changed. With several kinds of layers those that see all
            keys are stretched.

    Raises:
        CheckpointError: The file stretches them in a way that is not computed.
    """
    every = raw["rope_parameters"]
    parameters = every.get("full_attention", every)
    architecture = _field(reader, "general.architecture")
    scaling = f"{architecture}.rope.scaling"
    factor_names = (f"{scaling}.factor", f"{architecture}.rope.scale_linear")  # the last is old
    stretch = next((factor for name in factor_names if (factor := _field(reader, name))), 1)
    # Without a type the factor is linear's, as in llama.cpp.
    kind = _field(reader, f"{scaling}.type") or ("none" if stretch == 1 else "linear")
    factors = next((one.data for one in reader.tensors if one.name == _ROPE_FACTORS), None)
    if kind not in ("none", *_STRETCHED):
        raise CheckpointError(f"{source}: {scaling}.type {kind} is not supported")
    _check_scaling(reader, scaling, source)
    if kind in _STRETCHED:
        parameters |= {"rope_type": kind, "factor": float(stretch)}
        original = _field(reader, f"{scaling}.original_context_length")
        if original is not None:
            parameters["original_max_position_embeddings"] = int(original)
    for key, name in _YARN_LIMITS.items():
        limit = _field(reader, f"{scaling}.{name}")
        if kind == "yarn" and limit is not None:
            parameters[key] = float(limit)
    if factors is None or bool(np.all(factors == 1)):
        return
    factor = float(np.max(factors))
    wanted = _llama3_factors(2 * len(factors), parameters["rope_theta"], factor)
    if kind != "none" or not np.allclose(factors, wanted, rtol=_FACTOR_TOLERANCE, atol=0):
        raise CheckpointError(f"{source}: {_ROPE_FACTORS} are not those of a Llama 3 model")
    # Divisors were rounded to float32 as the factor was.
    parameters |= {"rope_type": "llama3", "factor": round(factor, 4), **_LLAMA3}


def _check_scaling(reader: "GGUFReader", scaling: str, source: Path) -> None:
    """Raises CheckpointError for a number of stretched rotary embeddings that is not computed
    with.
    """
    for name in reader.fields:
        key = name.removeprefix(f"{scaling}.")
        if key == name or key in _SCALING_KEYS or key in _YARN_LIMITS.values():
            continue
        value = _field(reader, name)
        if value not in _NEUTRAL_SCALING.get(key, (0,)):
            raise CheckpointError(f"{source}: {name} {value} is not supported")


def _field(reader: "GGUFReader", name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """Computes the divisors of Llama 3.1's scaling: none for short wavelengths, `factor` for long
    ones, and a ramp between them.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / wavelengths
    ramp = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - ramp) / factor + ramp)


def _read(
    reader: "GGUFReader", config: Any, source: Path
) -> "tuple[dict[str, torch.Tensor], dict[str, str]]":
    """Returns the tensors of a checkpoint, and the types of quantised matrices by name."""
    import torch
    from gguf.quants import dequantize

    found: dict[str, torch.Tensor] = {}
    types: dict[str, str] = {}
    for stored in reader.tensors:
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
