"""Small random checkpoints of every architecture, written by transformers itself."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 128
EOS = 1

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "MistralForCausalLM": {"sliding_window": 24, "head_dim": 16},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "Gemma3ForCausalLM": {
        "head_dim": 16,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False,  # tied, random weights repeat the last token for ever
        "num_hidden_layers": 6,
    },
}


def make_checkpoint(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    seed: int = 0,
    noise: float = 0.0,
    **changes: Any,
) -> Path:
    """Writes a random float32 checkpoint of `architecture` and returns its directory.

    The weights are wide enough that greedy output is not one repeated token. `noise` disturbs each
    tensor by that part of its spread: a draft that agrees with its target sometimes.
    """
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"), None)
    if architecture == "Gemma3ForCausalLM":
        config_class = transformers.Gemma3TextConfig
    settings = {**SMALL, **ARCHITECTURES.get(architecture, {}), **changes}
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config_class(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std().nan_to_num(0.0) * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory
