"""Tiny GGUF files of every architecture and type that is read.

Blocks are made by gguf's own quantiser where it has one, and of random fields where it has none;
gguf's dequantiser says in float32 which weights they stand for.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

# Bytes of the float16 factors of K blocks.
_K_FACTORS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *_K_FACTORS)
HIDDEN, MLP, HEADS, KV_HEADS, LAYERS = 256, 512, 4, 2, 2
# transformers reads no head sizes but each architecture's own.
HEAD_DIMS = {"llama": 64, "qwen2": 64, "qwen3": 128, "gemma3": 256}
CONTEXT = 64


def stored(kind: str, values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Returns the bytes of a matrix [outputs, inputs] in a type; K types keep no more of the values
    than their size.
    """
    if kind not in _K_FACTORS:
        return gguf.quants.quantize(values, GGMLQuantizationType[kind])
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (values.size // size, num_bytes), dtype=np.uint8)
    spread = values.std() / (64 * 32 if kind == "Q6_K" else 32 * 8)
    for at in _K_FACTORS[kind]:
        factors = np.abs(generator.normal(spread, spread / 4, (len(blocks), 1)))
        blocks[:, at : at + 2] = factors.astype(np.float16).view(np.uint8)
    return blocks.reshape(len(values), -1)


def meant(kind: str, data: np.ndarray) -> np.ndarray:
    """Returns the weights that a matrix's bytes stand for, float32."""
    return gguf.quants.dequantize(data, GGMLQuantizationType[kind])


def write(
    path: Path,
    types: Callable[[str], str],
    architecture: str = "llama",
    is_tied: bool = False,
    change: dict[str, np.ndarray | None] | None = None,
    scaling: tuple[str, float, int] | None = None,
    metadata: Mapping[str, float | str] | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> Path:
    """Writes a model of two layers.

    Args:
        types: Returns the type of a matrix by its name in the file.
        change: Tensors to add, or to put in place of others; None leaves one out.
        scaling: Type, factor and original context length of stretched rotary embeddings.
        metadata: Further values by key: whole numbers, others, truth values and texts.
        tokenizer: BPE tokenizer with the tokens <s> and </s>; a small one of GPT-2's kind when
            None.
    """
    writer, head_dim = gguf.GGUFWriter(path, architecture), HEAD_DIMS[architecture]
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if scaling is not None:
        writer.add_string(f"{architecture}.rope.scaling.type", scaling[0])
        writer.add_rope_scaling_factor(scaling[1])
        writer.add_rope_scaling_orig_ctx_len(scaling[2])
    for key, value in (metadata or {}).items():
        _add_value(writer, key, value)
    if architecture == "llama" and "llama.rope.dimension_count" not in (metadata or {}):
        writer.add_rope_dimension_count(head_dim)
    if architecture == "gemma3":
        writer.add_sliding_window(8)
    vocab_size = _add_tokenizer(writer, tokenizer)
    generator = np.random.default_rng(0)
    extra = dict(change or {})

    def add(name: str, *shape: int) -> None:
        values = generator.normal(size=shape).astype(np.float32) * 0.08
        if name in extra:
            other = extra.pop(name)
            if other is not None:
                writer.add_tensor(name, other)
            return
        if len(shape) == 1:
            is_norm = name.endswith("norm.weight")
            writer.add_tensor(name, values + 1 if is_norm else values)
            return
        kind = types(name)
        writer.add_tensor(
            name, stored(kind, values, generator), raw_dtype=GGMLQuantizationType[kind]
        )

    add("token_embd.weight", vocab_size, HIDDEN)
    if not is_tied:
        add("output.weight", vocab_size, HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        for name, shape in _layer(architecture).items():
            add(f"blk.{layer}.{name}", *shape)
    for name, values in extra.items():
        if values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: gguf.GGUFWriter, key: str, value: float | str) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: tokenizers.Tokenizer | None) -> int:
    """Writes a tokenizer as llama.cpp's converter does; returns the size of its vocabulary."""
    if tokenizer is None:
        tokens = ["<s>", "</s>", *(chr(c) for c in range(33, 127)), "Ġ", "ab"]
        types, merges = [3, 3] + [1] * (len(tokens) - 2), ["a b"]
        has_bytes = True
        writer.add_tokenizer_pre("llama-bpe")
    else:
        by_number = {number: text for text, number in tokenizer.get_vocab().items()}
        tokens = [by_number[number] for number in sorted(by_number)]
        added = tokenizer.get_added_tokens_decoder()
        types = [3 if number in added else _kind(text) for number, text in enumerate(tokens)]
        merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
        has_bytes = isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2" if has_bytes else "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if has_bytes:
        writer.add_token_merges(merges)
    else:
        ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in enumerate(merges)}
        writer.add_token_scores([ranks.get(text, -1e6) for text in tokens])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    return len(tokens)


def _kind(text: str) -> int:
    """Returns the type of a token: 1 for ordinary ones, 2 for the unknown, 6 for a byte."""
    return {"<unk>": 2}.get(text, 6 if re.fullmatch("<0x..>", text) else 1)


def _layer(architecture: str) -> dict[str, tuple[int, ...]]:
    head_dim = HEAD_DIMS[architecture]
    heads, kv = HEADS * head_dim, KV_HEADS * head_dim
    found: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (heads, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_output.weight": (HIDDEN, heads),
        "ffn_gate.weight": (MLP, HIDDEN),
        "ffn_up.weight": (MLP, HIDDEN),
        "ffn_down.weight": (HIDDEN, MLP),
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
    }
    if architecture == "qwen2":
        found |= {"attn_q.bias": (heads,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if architecture in ("qwen3", "gemma3"):
        found |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    if architecture == "gemma3":
        found |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    return found
