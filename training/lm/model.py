"""A Llama decoder made for training: parameters carry Hugging Face names, so a state dict is a
checkpoint.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.errors import CheckpointError
from foredraft.models.config_reader import read_json
from foredraft.models.quantization_config import QUANTIZATION_KEYS

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a Llama decoder. `tie_embeddings` uses one matrix for input and output."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True

    @classmethod
    def from_dir(cls, path: Path) -> "LlamaShape":
        """Reads the sizes from a Hugging Face `config.json`.

        Raises:
            CheckpointError: The file cannot be read, or lacks one.
        """
        config = read_json(path / "config.json")
        for name in _SIZES:
            if not isinstance(config.get(name), int):
                raise CheckpointError(f"{path / 'config.json'}: {name} is missing")
        heads = config["num_attention_heads"]
        rope, epsilon = config.get("rope_parameters") or {}, config.get("rms_norm_eps")
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            context_length=config["max_position_embeddings"],
            rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
            norm_eps=1e-6 if epsilon is None else epsilon,
            tie_embeddings=bool(config.get("tie_word_embeddings")),
        )

    def to_config(self, dtype: str, bos: int, eos: int) -> dict[str, Any]:
        """Returns the Hugging Face configuration of this model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.context_length,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "use_cache": True,
            "dtype": dtype,
            "torch_dtype": dtype,
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for a checkpoint or a log."""
        return asdict(self)


def is_plain_llama(path: Path) -> bool:
    """Returns whether config.json says no more than `LlamaShape` holds.

    Raises:
        CheckpointError: The file cannot be read.
    """
    config = read_json(path / "config.json")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return (
        config.get("architectures") == ["LlamaForCausalLM"]
        and config.get("hidden_act", "silu") == "silu"
        and rope.get("rope_type", rope.get("type", "default")) == "default"
        and not any(config.get(key) for key in ("attention_bias", "mlp_bias", *QUANTIZATION_KEYS))
    )


def rope_table(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of the rotary angles, float32 [length, head_dim / 2]."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), 1.0 / theta**steps)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [..., T, head_dim] in the half-split layout; cos and sin broadcast over [..., T,
    head_dim / 2].
    """
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


class RMSNorm(nn.Module):
    """Computes x / rms(x) * weight in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


class Linear(nn.Module):
    """A linear map whose weights are used in the activations' dtype (float32 master weights, bf16
    compute).
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        inputs = shape.hidden_size
        self.shape = shape
        self.q_proj = Linear(inputs, shape.num_heads * shape.head_dim)
        self.k_proj = Linear(inputs, shape.num_kv_heads * shape.head_dim)
        self.v_proj = Linear(inputs, shape.num_kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.num_heads * shape.head_dim, shape.hidden_size)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries [B, heads, T, D], rotated keys and values [B, kv_heads, T, D]."""
        shape = self.shape
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        rows = F.linear(x, weight.to(x.dtype)).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        q, k, v = rows.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x, cos, sin)
        groups = self.shape.num_heads != self.shape.num_kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class GatedMLP(nn.Module):
    """Computes down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat((self.gate_proj.weight, self.up_proj.weight))
        gate, up = F.linear(x, weight.to(x.dtype)).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP on a residual stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = GatedMLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaBody(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Llama(nn.Module):
    """A Llama decoder for training and scoring (no KV cache).

    Args:
        shape: Sizes of the model.
        compute_dtype: Dtype of activations and of the matrix products.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape, self.compute_dtype = shape, compute_dtype
        self.model = LlamaBody(shape)
        if not shape.tie_embeddings:
            self.lm_head = Linear(shape.hidden_size, shape.vocab_size)
        cos, sin = rope_table(shape.context_length, shape.head_dim, shape.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def initialize(self, seed: int) -> None:
        """Fills the weights: normal of deviation 0.02, residual outputs scaled by the depth."""
        generator = torch.Generator().manual_seed(seed)
        depth_scale = (2 * self.shape.num_layers) ** -0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() < 2:
                    continue
                std = 0.02 * depth_scale if "o_proj" in name or "down_proj" in name else 0.02
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    @property
    def output_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits, [vocab, hidden]."""
        return self.model.embed_tokens.weight if self.shape.tie_embeddings else self.lm_head.weight

    def forward(self, tokens: Tensor, capture: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """Computes hidden states after the final norm [B, T, H], and the streams in `capture`.

        These are the residual streams that enter the layers of these numbers.

        An index equal to the number of layers asks for the stream that leaves the last one.
        """
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.model.embed_tokens(tokens).to(self.compute_dtype)
        captured = {}
        for index, layer in enumerate(self.model.layers):
            if index in capture:
                captured[index] = x
            x = layer(x, cos, sin)
        captured[len(self.model.layers)] = x
        return self.model.norm(x), [captured[index] for index in capture]

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits in the compute dtype, [..., vocab]."""
        return F.linear(hidden, self.output_weight.to(hidden.dtype))

    def num_parameters(self) -> int:
        """Returns the number of distinct weights."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, context: int) -> float:
        """Returns the floating-point operations of one training step per token.

        Each weight used in a product takes 6; causal attention is added.
        """
        shape = self.shape
        matrices = sum(p.numel() for n, p in self.named_parameters() if p.dim() == 2)
        if not shape.tie_embeddings:
            matrices -= shape.vocab_size * shape.hidden_size
        attention = 6 * shape.num_layers * shape.num_heads * shape.head_dim * context
        return 6.0 * matrices + attention
