"""The draft heads as plain torch modules, with the checkpoint names that other servers read.

All heads share the shift of EAGLE: slot p takes the target's features of position p and the token
of position p + 1, and predicts the token at p + 2. A head's own output stands in for the features
of positions that the target has not seen yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.errors import CheckpointError, ConfigError
from training.export import load_tensors, save_sharded, to_bf16, write_json
from training.lm.model import GatedMLP, Linear, LlamaShape, RMSNorm, apply_rope, rope_table

ALGORITHMS = ("EAGLE3", "EAGLE", "MTP")


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Configuration of a head.

    Attributes:
        algorithm: One of ALGORITHMS.
        layer: Sizes of the one decoder layer; hidden size and vocabulary are the target's.
        aux_layers: EAGLE-3: the target layers whose incoming residual streams are fused.
        draft_vocab_size: EAGLE-3: number of rows of the head's own output matrix.
        stream_norms: EAGLE-3: whether each stream is normalised before they are fused, for targets
            whose residual streams are large.
    """

    algorithm: str
    layer: LlamaShape
    aux_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    stream_norms: bool = False


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Returns EAGLE-3's usual three streams, which enter layers 2, n / 2 and n - 3.

    For a tiny target they are the first, middle and last.
    """
    if num_layers < 6:
        return (1, max(1, num_layers // 2), num_layers)
    return (2, num_layers // 2, num_layers - 3)


class HeadAttention(nn.Module):
    """Projections of a head's attention; callers decide which keys a row sees."""

    def __init__(self, shape: LlamaShape, inputs: int, bias: bool) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = Linear(inputs, shape.num_heads * shape.head_dim, bias)
        self.k_proj = Linear(inputs, shape.num_kv_heads * shape.head_dim, bias)
        self.v_proj = Linear(inputs, shape.num_kv_heads * shape.head_dim, bias)
        self.o_proj = Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries, rotated keys and values, all [B, heads, R, D].

        Keys and values are repeated for their query groups.
        """
        shape = self.shape
        q, k, v = (
            projection(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        groups = shape.num_heads // shape.num_kv_heads
        return q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


class HeadLayer(nn.Module):
    """One decoder layer; the norms in front of its attention differ between the algorithms."""

    post_attention_layernorm: RMSNorm

    def __init__(self, shape: LlamaShape, inputs: int, bias: bool, norms: tuple[str, ...]) -> None:
        super().__init__()
        for name in (*norms, "post_attention_layernorm"):
            setattr(self, name, RMSNorm(shape.hidden_size, shape.norm_eps))
        self.self_attn = HeadAttention(shape, inputs, bias)
        self.mlp = GatedMLP(shape)

    def finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """Returns the layer's output from attention's output [B, heads, R, D] and the residual."""
        x = residual + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftHead(nn.Module):
    """Base of the heads.

    Subclasses define the features, the layer's input, and its output.

    Args:
        shape: Configuration of the head.
        prefix: Prefix of the names of the layer's tensors in a checkpoint.
    """

    cos: Tensor
    sin: Tensor
    layer: HeadLayer

    def __init__(self, shape: HeadShape, prefix: str) -> None:
        super().__init__()
        self.shape, self.prefix = shape, prefix
        layer = shape.layer
        cos, sin = rope_table(layer.context_length, layer.head_dim, layer.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def initialize(self, seed: int) -> None:
        """Fills the matrices from a normal distribution of deviation 0.02, not biases and norms."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)

    def fuse(self, hidden: Tensor, captured: list[Tensor]) -> Tensor:
        """Returns features of the target's positions, [B, T, H].

        By default these are its last hidden states after the final norm.
        """
        return hidden

    def prepare(self, embeds: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (input of the attention's projections, residual stream) of rows [B, R, H].

        Positions are [R] or [B, R].
        """
        raise NotImplementedError

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes queries, keys and values of rows at rotary positions [R] or [B, R]."""
        cos, sin = self.cos[positions], self.sin[positions]
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        return self.layer.self_attn.project(x, cos, sin)

    def complete(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """Returns the head's output, which is also the feature of the next position."""
        return self.layer.finish(mixed, residual)

    def logits(self, features: Tensor, output_weight: Tensor) -> Tensor:
        """Computes logits over the draft vocabulary; `output_weight` is the target's head."""
        return F.linear(features, output_weight.to(features.dtype))

    def checkpoint(self) -> dict[str, Tensor]:
        """Returns the tensors by their names in a checkpoint."""
        return {name.replace("layer.", self.prefix, 1): t for name, t in self.state_dict().items()}

    def load_checkpoint(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads tensors named like in `checkpoint`; missing or unexpected names are errors."""
        own = {name.replace("layer.", self.prefix, 1): name for name in self.state_dict()}
        wrong = sorted(set(own) ^ set(tensors))
        if wrong:
            raise CheckpointError(f"missing or unexpected tensors: {', '.join(wrong)}")
        self.load_state_dict({own[name]: tensor for name, tensor in tensors.items()})

    def config(self) -> dict[str, Any]:
        """Returns the checkpoint's `config.json`."""
        base = self.shape.layer.to_config("bfloat16", 0, 0)
        return base | {"num_hidden_layers": 1, "tie_word_embeddings": False}


class EagleHead(DraftHead):
    """EAGLE and EAGLE-2: one layer without input norm on fc([embedding; feature]); the target's
    output head.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, "layers.0.")
        size = shape.layer.hidden_size
        self.fc = Linear(2 * size, size, bias=True)
        self.layer = HeadLayer(shape.layer, size, bias=False, norms=())

    def prepare(self, embeds: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat((embeds, features), dim=-1))
        return x, x

    def config(self) -> dict[str, Any]:
        return super().config() | {"architectures": ["LlamaForCausalLMEagle"]}


class Eagle3Head(DraftHead):
    """EAGLE-3: three fused streams, attention on [embedding; feature], an output head of its own
    over fewer tokens.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, "midlayer.")
        size, vocab = shape.layer.hidden_size, shape.layer.vocab_size
        count = len(shape.aux_layers)
        self.fc_norm = nn.ModuleList(
            RMSNorm(size, shape.layer.norm_eps) for _ in range(count if shape.stream_norms else 0)
        )
        self.fc = Linear(count * size, size, bias=False)
        self.layer = HeadLayer(shape.layer, 2 * size, False, ("input_layernorm", "hidden_norm"))
        self.norm = RMSNorm(size, shape.layer.norm_eps)
        self.lm_head = Linear(size, shape.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool))

    def set_vocabulary(self, ids: Tensor, output_weight: Tensor) -> None:
        """Chooses the draft vocabulary (ascending target ids) and starts its head from the target's
        rows.
        """
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True
        with torch.no_grad():
            self.lm_head.weight.copy_(output_weight[ids])

    def fuse(self, hidden: Tensor, captured: list[Tensor]) -> Tensor:
        if self.fc_norm:
            captured = [norm(stream) for norm, stream in zip(self.fc_norm, captured, strict=True)]
        return self.fc(torch.cat(captured, dim=-1))

    def prepare(self, embeds: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.layer
        normed = (layer.input_layernorm(embeds), layer.hidden_norm(features))
        return torch.cat(normed, dim=-1), features

    def logits(self, features: Tensor, output_weight: Tensor) -> Tensor:
        return self.lm_head(self.norm(features))

    def config(self) -> dict[str, Any]:
        norms = {"fc_norm": True} if self.shape.stream_norms else {}
        return (
            super().config()
            | norms
            | {
                "architectures": ["LlamaForCausalLMEagle3"],
                "draft_vocab_size": self.shape.draft_vocab_size,
                "target_hidden_size": self.shape.layer.hidden_size,
                "eagle_config": {
                    # A stream that enters layer i is the output of layer i - 1; the format counts
                    # outputs.
                    "eagle_aux_hidden_state_layer_ids": [
                        index - 1 for index in self.shape.aux_layers
                    ],
                    "use_aux_hidden_state": True,
                },
            }
        )


class MTPHead(DraftHead):
    """A MiMo-like multi-token prediction layer: input_proj([norm(feature); norm(embedding)]), query
    biases, a final norm.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, "model.mtp_layers.0.")
        size, eps = shape.layer.hidden_size, shape.layer.norm_eps
        self.token_layernorm = RMSNorm(size, eps)
        self.hidden_layernorm = RMSNorm(size, eps)
        self.input_proj = Linear(2 * size, size, bias=False)
        self.final_layernorm = RMSNorm(size, eps)
        self.layer = HeadLayer(shape.layer, size, bias=True, norms=("input_layernorm",))

    def prepare(self, embeds: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.layer
        # The format zeroes the embedding of position 0.
        embeds = embeds * (positions != 0)[..., None]
        pair = (self.hidden_layernorm(features), self.token_layernorm(embeds))
        x = self.input_proj(torch.cat(pair, dim=-1))
        return layer.input_layernorm(x), x

    def complete(self, mixed: Tensor, residual: Tensor) -> Tensor:
        return self.final_layernorm(super().complete(mixed, residual))

    def checkpoint(self) -> dict[str, Tensor]:
        names = {name: self.prefix + name.removeprefix("layer.") for name in self.state_dict()}
        return {names[name]: tensor for name, tensor in self.state_dict().items()}

    def load_checkpoint(self, tensors: Mapping[str, Tensor]) -> None:
        renamed = {}
        outer = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        for name, tensor in tensors.items():
            inner = name.removeprefix(self.prefix)
            renamed[inner if inner.startswith(outer) else self.prefix + inner] = tensor
        super().load_checkpoint(renamed)

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["MiMoMTP"],
            "attention_bias": True,
            "num_nextn_predict_layers": 1,
        }


def make_head(shape: HeadShape) -> DraftHead:
    """Creates a head with uninitialised matrices."""
    kinds: dict[str, type[EagleHead] | type[Eagle3Head] | type[MTPHead]] = {
        "EAGLE": EagleHead,
        "EAGLE3": Eagle3Head,
        "MTP": MTPHead,
    }
    if shape.algorithm not in kinds:
        raise ConfigError(f"--algorithm must be one of {', '.join(ALGORITHMS)}")
    return kinds[shape.algorithm](shape)


def save_head(head: DraftHead, out: Path, target: str = "") -> None:
    """Writes a head's checkpoint directory: bf16 safetensors, and `config.json` with the name of
    the target, if given.
    """
    save_sharded(to_bf16(head.checkpoint()), out)
    write_json(out / "config.json", head.config() | ({"target_model": target} if target else {}))


def load_head(path: Path, shape: HeadShape) -> DraftHead:
    """Reads a directory that `save_head` wrote.

    Raises:
        CheckpointError: The tensors do not fit the shape.
    """
    head = make_head(shape)
    tensors = load_tensors(path)
    head.load_checkpoint(
        {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    )
    return head
