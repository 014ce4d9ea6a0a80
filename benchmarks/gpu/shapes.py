"""Shapes of GPU benchmarks with random weights:

Llama-3.1-8B, an EAGLE-3 head for it, and other drafts.
"""

import json
from pathlib import Path
from typing import Any

BITS = {"unquant": 16, "fp8": 8, "int8": 8, "int4": 4}  # of a layer's weight
BANDWIDTH = 4.49e12  # bytes/s, measured on an H200
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
EAGLE3_8B = {
    **LLAMA_8B,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}
QWEN3_8B = {
    **LLAMA_8B,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_hidden_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
}
QWEN3_32B = {
    **QWEN3_8B,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA_1B = {
    **LLAMA_8B,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
TARGETS: dict[str, dict[str, Any]] = {
    "llama-1b": LLAMA_1B,
    "llama-8b": LLAMA_8B,
    "qwen3-32b": QWEN3_32B,
    "llama-70b": LLAMA_70B,
}
# Wide heads, windows, norms of heads and around blocks.
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "vocab_size": 262144,
}
# Drafts of Qwen3-8B: blocks in DeepSpec's layout, which propose as many tokens as they have rows,
# and heads in the speculators library's and SGLang's.
_EAGLE3_QWEN = {**QWEN3_8B, "num_hidden_layers": 1, "draft_vocab_size": 32000}
QWEN_DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    name.lower(): (
        name,
        {
            **QWEN3_8B,
            "architectures": ["Qwen3DSparkModel"],
            "num_hidden_layers": 5,
            "num_target_layers": 36,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "mask_token_id": 151669,
            "block_size": 8,
            "markov_rank": rank,
        },
    )
    for name, rank in (("DFLASH", 0), ("DSPARK", 256))
} | {
    "peagle": (
        "PEAGLE",
        {
            "architectures": ["PEagleDraftModel"],
            "speculators_model_type": "peagle",
            "transformer_layer_config": {
                **QWEN3_8B,
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "num_hidden_layers": 4,
            },
            "draft_vocab_size": 32000,
            "target_hidden_size": 4096,
            "mask_token_id": 151669,
        },
    ),
    "eagle3": (
        "EAGLE3",
        {**_EAGLE3_QWEN, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    ),
}
_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
# Steps, topk, draft tokens, and the accept length that is simulated.
MODES = {"none": (0, 0, 0, 1.0), "chain": (3, 1, 4, 2.8), "tree": (5, 8, 32, 4.7)}


def target_of(shape: str, num_layers: int = 0) -> dict[str, Any]:
    """Returns the configuration of one of TARGETS; with fewer layers where a number is given."""
    config = TARGETS[shape]
    return {**config, "num_hidden_layers": num_layers or config["num_hidden_layers"]}


def write_checkpoints(
    folder: Path, num_layers: int = 0, shape: str = "llama-8b"
) -> tuple[Path, Path]:
    """Writes directories with only a config.json, for --load-format dummy: the target and its
    head.
    """
    target, head = folder / shape, folder / "eagle3"
    config = target_of(shape, num_layers)
    widths = {key: config[key] for key in _WIDTHS}
    for path, written in ((target, config), (head, {**EAGLE3_8B, **widths})):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(written, indent=1))
    return target, head


def write_qwen_checkpoints(folder: Path, name: str, block_size: int = 8) -> tuple[Path, Path]:
    """Writes the same for Qwen3-8B and one of QWEN_DRAFTS.

    Args:
        block_size: Number of rows of a block; only drafts of blocks have one.
    """
    target, draft = folder / "qwen8b", folder / name
    config = QWEN_DRAFTS[name][1]
    config = {**config, "block_size": block_size} if "block_size" in config else config
    for path, written in ((target, QWEN3_8B), (draft, config)):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(written, indent=1))
    return target, draft


def flags_of(mode: str, head: Path, max_batch: int, num_tokens: int) -> tuple[str, dict[str, Any]]:
    """Returns algorithm and flags of an engine for one mode.

    Args:
        num_tokens: Number of tokens of a prompt and its output.
    """
    flags = engine_flags(max_batch, num_tokens)
    if mode == "none":
        return "NONE", flags
    return "EAGLE3", flags | draft_flags(head, *MODES[mode])


def engine_flags(max_batch: int, num_tokens: int) -> dict[str, Any]:
    """Returns flags of an engine with random weights; see flags_of."""
    return {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "device": "cuda",
        "context_length": max(4096, num_tokens + 160),
        "max_running_requests": max_batch,
        "max_total_tokens": max_batch * (num_tokens + 160) + 4096,
        "chunked_prefill_size": 4096,
        "disable_radix_cache": True,
        "draft_step_timeout": 60.0,
        "num_threads": None,
    }


def draft_flags(head: Path, steps: int, topk: int, tokens: int, length: float) -> dict[str, Any]:
    """Returns flags of a draft with random weights and a simulated accept length."""
    return {
        "speculative_draft_model_path": str(head),
        "speculative_draft_load_format": "dummy",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": tokens,
        "speculative_draft_sampling": "topk",
        "simulate_accept_length": length,
    }


def target_bytes(config: dict[str, Any] = LLAMA_8B, bits: int = 16) -> int:
    """Returns the bytes of weights that a target forward reads: all but the embedding.

    Args:
        bits: Bits of a layer's weight; the LM head's have 16.
    """
    layers = config["num_hidden_layers"] * _layer(config)
    return layers * bits // 8 + 2 * config["hidden_size"] * int(config["vocab_size"])


def qwen_draft_bytes(name: str, levels: int) -> int:
    """Returns the bytes of bf16 weights that one of QWEN_DRAFTS reads at least for a proposal of
    some levels.
    """
    hidden, layer = 4096, _layer(QWEN3_8B)
    if name in ("dflash", "dspark"):
        body = 5 * layer + 5 * hidden * hidden + hidden * 151936
        return 2 * (body + (levels * 256 * 151936 if name == "dspark" else 0))
    fused, wide = 3 * hidden * hidden, hidden * (32 + 2 * 8) * 128
    if name == "peagle":
        return 2 * (4 * layer + wide + hidden * 32000 + fused)
    return 2 * (levels * (layer + wide + hidden * 32000) + fused)


def head_bytes(config: dict[str, Any] = LLAMA_8B) -> tuple[int, int]:
    """Returns the bytes of bf16 weights that a target's head reads in a draft step, and in an
    extension (with the fusion of three layers).
    """
    hidden = config["hidden_size"]
    heads = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * config["head_dim"]
    layer = _layer(config) + hidden * heads  # a head's input is twice as wide
    step = 2 * (layer + hidden * EAGLE3_8B["draft_vocab_size"])
    return step, step + 2 * 3 * hidden * hidden


def _layer(config: dict[str, Any]) -> int:
    """Returns the number of weights of a target's layer."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    heads = hidden * (2 * queries + 2 * keys) * head_dim
    return int(heads + 3 * hidden * config["intermediate_size"])
