"""Block drafters (DFlash, DSpark) as plain torch modules, with the checkpoint names that servers
read.

A block behind an anchor is [the anchor's token, mask tokens]. Its rows see the fused hidden states
of all positions before the anchor, and each other. Row k predicts the token after position anchor +
k.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.errors import CheckpointError, ConfigError
from training.draft.heads import HeadAttention, HeadLayer
from training.export import load_tensors, save_sharded, to_bf16, write_json
from training.lm.model import Linear, LlamaShape, RMSNorm, apply_rope, rope_table

BLOCK_ALGORITHMS = ("DFLASH", "DSPARK")


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Configuration of a block drafter.

    Attributes:
        algorithm: One of BLOCK_ALGORITHMS.
        layer: Sizes and number of the layers; hidden size and vocabulary are the target's.
        aux_layers: The target layers whose incoming residual streams are fused.
        num_target_layers: Number of layers of the target.
        block: Number of rows of a block, which is the number of tokens that it proposes.
        mask_token: Token id of the target that stands for tokens to be drafted.
        markov_rank: DSpark: rank of the bias that depends on the token before.
    """

    algorithm: str
    layer: LlamaShape
    aux_layers: tuple[int, ...]
    num_target_layers: int
    block: int
    mask_token: int
    markov_rank: int = 0

    def __post_init__(self) -> None:
        if self.algorithm not in BLOCK_ALGORITHMS:
            raise ConfigError(f"--algorithm must be one of {', '.join(BLOCK_ALGORITHMS)}")
        if (self.algorithm == "DSPARK") != (self.markov_rank > 0):
            raise ConfigError("--markov-rank is DSPARK's: above 0 there, and 0 elsewhere")


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Returns the layers whose incoming streams are fused, spread evenly over the target.

    z-lab's drafters choose the same. Of a target with too few layers for that they are the last; a
    tiny one may have fewer than `count`.
    """
    span = num_target_layers - 4
    if count == 1 or span < count - 1:
        return tuple(range(max(0, num_target_layers - count + 1), num_target_layers + 1))
    return tuple(round(1 + i * span / (count - 1)) + 1 for i in range(count))


class BlockAttention(HeadAttention):
    """A head's attention with norms of queries and keys."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns normalised and rotated queries, [B, heads, R, D]."""
        heads = self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        return apply_rope(self.q_norm(heads), cos, sin)

    def keys_and_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns normalised and rotated keys, and values, [B, heads, R, D] each.

        Both are repeated for their query groups.
        """
        k, v = (
            projection(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for projection in (self.k_proj, self.v_proj)
        )
        k = apply_rope(self.k_norm(k), cos, sin)
        groups = self.shape.num_heads // self.shape.num_kv_heads
        return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


class BlockLayer(HeadLayer):
    """A decoder layer of a block drafter."""

    input_layernorm: RMSNorm
    self_attn: BlockAttention

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape, shape.hidden_size, bias=False, norms=("input_layernorm",))
        self.self_attn = BlockAttention(shape)


class BlockHead(nn.Module):
    """A block drafter.

    Args:
        shape: Configuration of the drafter.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        layer, size = shape.layer, shape.layer.hidden_size
        self.fc = Linear(len(shape.aux_layers) * size, size)
        self.hidden_norm, self.norm = (RMSNorm(size, layer.norm_eps) for _ in range(2))
        self.layers = nn.ModuleList([BlockLayer(layer) for _ in range(layer.num_layers)])
        if shape.markov_rank:
            self.markov_head = nn.ModuleDict(
                {
                    "markov_w1": nn.Embedding(layer.vocab_size, shape.markov_rank),
                    "markov_w2": Linear(shape.markov_rank, layer.vocab_size),
                }
            )
            proj = Linear(size + shape.markov_rank, 1, bias=True)
            self.confidence_head = nn.ModuleDict({"proj": proj})
        length = layer.context_length + shape.block
        cos, sin = rope_table(length, layer.head_dim, layer.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def initialize(self, seed: int) -> None:
        """Fills the matrices from a normal distribution of deviation 0.02.

        The second matrix of DSpark's bias gets zeros; biases and norms keep zeros and ones.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
                    if "markov_w2" in name:
                        parameter.zero_()

    def fuse(self, captured: list[Tensor]) -> Tensor:
        """Returns the features that context keys and values are projected from, [B, T, H]."""
        return self.hidden_norm(self.fc(torch.cat(captured, -1)))

    def forward(self, features: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Computes hidden states of the rows of blocks after the final norm, [B, A, N, H].

        Args:
            features: Features from `fuse`, [B, T, H].
            blocks: Embeddings of the rows [B, A, N, H].
            anchors: int64 [A], the positions of their first rows, the same in all sequences.
        """
        batch, length = features.shape[:2]
        count, rows = blocks.shape[1:3]
        positions = (anchors[:, None] + torch.arange(rows, device=anchors.device)).flatten()
        number = torch.arange(count, device=anchors.device).repeat_interleave(rows)
        at = torch.arange(length, device=anchors.device)
        seen = torch.cat(
            (at[None, :] < anchors[number][:, None], number[:, None] == number[None, :]), 1
        )
        cos, sin = self.cos[positions], self.sin[positions]
        context = self.cos[:length], self.sin[:length]
        x = blocks.flatten(1, 2)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            keys, values = attention.keys_and_values(features, *context)
            own_keys, own_values = attention.keys_and_values(normed, cos, sin)
            mixed = F.scaled_dot_product_attention(
                attention.queries(normed, cos, sin),
                torch.cat((keys, own_keys), 2),
                torch.cat((values, own_values), 2),
                attn_mask=seen,
            )
            x = layer.finish(mixed, x)
        return self.norm(x).view(batch, count, rows, -1)

    def logits(self, hidden: Tensor, previous: Tensor, output_weight: Tensor) -> Tensor:
        """Computes logits of rows [..., H], given the tokens before [...] and the output head."""
        logits = F.linear(hidden, output_weight.to(hidden.dtype))
        if self.shape.markov_rank:
            embedded = self.markov_head["markov_w1"](previous).to(hidden.dtype)
            logits = logits + self.markov_head["markov_w2"](embedded)
        return logits

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Computes scores [...] whose sigmoid is the chance of acceptance; only for DSpark."""
        embedded = self.markov_head["markov_w1"](previous).to(hidden.dtype)
        score: Tensor = self.confidence_head["proj"](torch.cat((hidden, embedded), -1))
        return score.squeeze(-1)

    def config(self) -> dict[str, Any]:
        """Returns the checkpoint's `config.json`, in DeepSpec's form."""
        shape = self.shape
        config = shape.layer.to_config("bfloat16", 0, 0) | {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "tie_word_embeddings": False,
            "block_size": shape.block,
            "target_layer_ids": [layer - 1 for layer in shape.aux_layers],
            "num_target_layers": shape.num_target_layers,
            "mask_token_id": shape.mask_token,
            "markov_rank": shape.markov_rank,
        }
        if shape.markov_rank:
            config |= {
                "markov_head_type": "vanilla",
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            }
        return config


def block_loss(
    head: BlockHead,
    tokens: Tensor,
    captured: list[Tensor],
    probs: Tensor,
    anchors: Tensor,
    embed_weight: Tensor,
    output_weight: Tensor,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """Computes the loss of one block behind each anchor, with larger weights for earlier rows.

    Also returns the share of rows whose best token is the target's, [N].

    DFlash learns the target's distribution by cross-entropy; DSpark by a tenth of that and nine
    tenths of the distance of both distributions; half of it is the chance of a rejection. Its
    confidence head learns the chance of acceptance, for other servers: ours does not load it.

    Args:
        tokens: Token ids, int64 [B, T].
        captured: The target's residual streams [B, T, H] each.
        probs: The target's probabilities [B, T, V] of the token after each position.
        anchors: Positions of the anchors, int64 [A], each at most T - N - 1.
        gamma: Number of rows after which a row's weight has fallen to 1 / e.
    """
    block = head.shape.block
    offsets = torch.arange(block, device=tokens.device)
    rows = anchors[:, None] + offsets
    known = tokens[:, rows]  # [B, A, N]: the token before each row's
    inputs = known.clone()
    inputs[..., 1:] = head.shape.mask_token
    embeds = F.embedding(inputs, embed_weight)
    hidden = head(head.fuse(captured), embeds, anchors)
    logits = head.logits(hidden, known, output_weight).float()
    goal = probs[:, rows].float()
    log_q = F.log_softmax(logits, -1)
    entropy = -(goal * log_q).sum(-1)
    losses = entropy
    if head.shape.markov_rank:
        distance = (log_q.exp() - goal).abs().sum(-1)
        accepted = (1 - 0.5 * distance).detach().clamp(0, 1)
        scores = head.confidence(hidden, known).float()
        doubt = F.binary_cross_entropy_with_logits(scores, accepted, reduction="none")
        losses = 0.1 * entropy + 0.9 * distance + 0.1 * doubt
    weights = torch.exp(-offsets / gamma)
    agreement = (logits.argmax(-1) == goal.argmax(-1)).float().mean((0, 1))
    return (losses * weights).mean((0, 1)).sum() / weights.sum(), agreement


@torch.no_grad()
def block_chain(
    head: BlockHead,
    tokens: Tensor,
    captured: list[Tensor],
    embed_weight: Tensor,
    output_weight: Tensor,
    anchors: Tensor,
    steps: int,
) -> Tensor:
    """Counts how many of `steps` greedily drafted tokens match the text, int64 [B, A].

    A drafted token matters only if all before it were right, so the text's own tokens are used as
    the ones before it.
    """
    rows = anchors[:, None] + torch.arange(head.shape.block, device=tokens.device)
    known = tokens[:, rows]
    inputs = known.clone()
    inputs[..., 1:] = head.shape.mask_token
    hidden = head(head.fuse(captured), F.embedding(inputs, embed_weight), anchors)
    best = head.logits(hidden[:, :, :steps], known[:, :, :steps], output_weight).argmax(-1)
    right = best == tokens[:, rows[:, :steps] + 1]
    return right.long().cumprod(-1).sum(-1)


def save_block_head(head: BlockHead, out: Path, target: str) -> None:
    """Writes a checkpoint directory: bf16 safetensors and `config.json` with the target's name."""
    save_sharded(to_bf16(dict(head.state_dict())), out)
    write_json(out / "config.json", head.config() | {"target_model": target})


def load_block_head(path: Path, shape: BlockShape) -> BlockHead:
    """Reads a directory that `save_block_head` wrote.

    Raises:
        CheckpointError: The tensors do not fit the shape.
    """
    head = BlockHead(shape)
    tensors: Mapping[str, Tensor] = load_tensors(path)
    try:
        head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise CheckpointError(f"{path} holds another draft: {error}") from None
    return head
