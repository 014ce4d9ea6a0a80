"""The architectures that one decoder computes, a row for each: how their config.json is read."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Says how to read the config.json of one architecture.

    Attributes:
        model_type: The file's `model_type`.
        keys: Keys that it may have beside those of all architectures.
        qk_norm: Whether queries and keys are normalised per head.
        always_bias: Whether queries, keys and values have a bias whatever the file says.
        attention_bias: Default of the key.
        qkv_bias_only: Whether the output projection never has a bias.
        gemma: Whether it has Gemma's norms, embedding scale and rotary embeddings.
        head_dim: Default of the key; None for the hidden size divided by the number of heads.
        activation: Default of the key.
        max_positions: Default of `max_position_embeddings`.
        sliding: Layers with a window where `layer_types` is absent: none, all, from
            `max_window_layers` on ("upper"), or by a pattern.
    """

    model_type: str
    keys: frozenset[str] = frozenset()
    qk_norm: bool = False
    always_bias: bool = False
    attention_bias: bool = False
    qkv_bias_only: bool = False
    gemma: bool = False
    head_dim: int | None = None
    activation: str = "silu"
    max_positions: int = 32768
    sliding: str = "none"


_WINDOW_KEYS = frozenset({"sliding_window"})
_GEMMA_KEYS = _WINDOW_KEYS | {
    "sliding_window_pattern",
    "hidden_activation",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "final_logit_softcapping",
}
_QWEN2 = Family(
    "qwen2",
    _WINDOW_KEYS,
    always_bias=True,
    attention_bias=True,
    qkv_bias_only=True,
    sliding="upper",
)
FAMILIES = {
    "LlamaForCausalLM": Family("llama", max_positions=2048),
    "MistralForCausalLM": Family("mistral", _WINDOW_KEYS, max_positions=131072, sliding="all"),
    "Qwen2ForCausalLM": _QWEN2,
    "MiMoForCausalLM": dataclasses.replace(_QWEN2, model_type="mimo"),
    "Qwen3ForCausalLM": Family("qwen3", _WINDOW_KEYS, qk_norm=True, head_dim=128, sliding="upper"),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        _GEMMA_KEYS,
        qk_norm=True,
        gemma=True,
        head_dim=256,
        activation="gelu_pytorch_tanh",
        max_positions=131072,
        sliding="pattern",
    ),
}
