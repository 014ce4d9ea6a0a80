"""The shapes that the GPU benchmarks run with random weights: Llama-3.1-8B and an EAGLE-3 head for it."""

import json
from pathlib import Path

LLAMA_8B = {
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


def write_checkpoints(folder: Path, num_layers: int) -> tuple[Path, Path]:
    """Directories with a config.json alone, for --load-format dummy: the target and its head."""
    target, head = folder / "llama8b", folder / "eagle3"
    for path, config in (
        (target, {**LLAMA_8B, "num_hidden_layers": num_layers}),
        (head, EAGLE3_8B),
    ):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1))
    return target, head


def target_bytes(num_layers: int = 32) -> int:
    """Bytes of bf16 weights that a target forward reads: all but the embedding."""
    c = LLAMA_8B
    hidden, ffn = int(c["hidden_size"]), int(c["intermediate_size"])  # type: ignore[call-overload]
    heads = 32 * 128 + 2 * 8 * 128
    layer = hidden * heads + 32 * 128 * hidden + 3 * hidden * ffn
    return 2 * (num_layers * layer + hidden * 128256)


def head_bytes() -> tuple[int, int]:
    """Bytes of bf16 weights of a draft step and of an extension (with the fusing of three layers) of the head."""
    hidden, ffn = 4096, 14336
    layer = 2 * hidden * (32 * 128 + 2 * 8 * 128) + 32 * 128 * hidden + 3 * hidden * ffn
    step = 2 * (layer + hidden * 32000)
    return step, step + 2 * 3 * hidden * hidden
