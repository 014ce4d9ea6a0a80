"""What all draft heads are: layers that continue a target's hidden states by the target's own embedding and LM head.

A row of a head pairs the hidden state of position p, the target's or one the head made itself, with the token at p + 1;
it stands at position p and its logits are about the token at p + 2.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from foredraft.attention.base import AttentionBackend, Batch
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.attention import SelfAttention
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.mlp import GatedMLP
from foredraft.layers.norm import RMSNorm
from foredraft.layers.rotary import Rotary
from foredraft.models.config import ModelConfig
from foredraft.models.head_config import HeadConfig
from foredraft.models.layer_parts import layer_parts
from foredraft.models.rope_config import RopeConfig

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class SharedWeights:
    """What a head uses of its target.

    Attributes:
        embedding: Rows of the vocabulary, not scaled.
        lm_head: From hidden states to logits, over the columns of `token_map`.
        token_map: int64, ascending or not: the target's token of each column; None for all of them.
    """

    embedding: Embedding
    lm_head: LMHead
    token_map: torch.Tensor | None = None


@dataclass(slots=True)
class HeadOutput:
    """What a forward gives.

    Attributes:
        logits: [the rows asked for, columns of `DraftHead.token_map`]; float32 on the CPU, of the activations' type on a GPU.
        features: [rows, hidden_size], for those that continue them: of the rows asked for, or of all where that was asked.
    """

    logits: torch.Tensor
    features: torch.Tensor


@dataclass(slots=True)
class Pass:
    """What the layers of one forward share.

    Attributes:
        kept_rows: int64, the rows that the last layer gives; None for all. Of the others only keys and values matter.
    """

    angles: Mapping[RopeConfig, Angles]
    batch: Batch
    kv: PagedKV
    attention: AttentionBackend
    plan: object
    kept_rows: torch.Tensor | None


def block_tensors(prefix: str, attention: SelfAttention, mlp: GatedMLP) -> dict[str, torch.Tensor]:
    """The memory that the tensors of a head's attention and MLP fill; their names begin with `prefix`."""
    targets = attention.targets(f"{prefix}self_attn.") | mlp.targets(f"{prefix}mlp.")
    return {name: target.memory for name, target in targets.items()}


class HeadLayer(nn.Module):
    """Attention and MLP of a head, around its residual stream; what is normalised before attention, the head decides.

    Args:
        layer: Of the cache.
        input_size: Width of what attention reads.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        input_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._index = layer
        self._rope = config.ropes[layer]
        self.attention, self.mlp = layer_parts(config, layer, input_size, dtype, device)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, False, dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        stream: torch.Tensor,
        run: Pass,
        is_last: bool,
        next_norm: RMSNorm | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream [num_rows, hidden_size] after the layer, and its norm; after the last one of the kept rows alone.

        Args:
            x: [num_rows, input_size], read by attention.
            stream: [num_rows, hidden_size]; left as it is.
            next_norm: Of the stream that leaves; None for none.
        """
        angles = run.angles[self._rope]
        # Added to what attention gives, which is nobody else's.
        out = self.attention(x, angles, self._index, run.batch, run.kv, run.attention, run.plan)
        if is_last and run.kept_rows is not None:
            out, stream = out[run.kept_rows], stream[run.kept_rows]
        delta = self.mlp(self.mlp_norm.add(out, stream), later=next_norm is not None)
        if next_norm is None:
            out.add_(delta)
            return out, out
        normed = next_norm.add(out, delta)
        return out, normed


class DraftHead(nn.Module, ABC):
    """Base of the heads.

    Args:
        config: What it is.
        shared: Of the target.
        num_target_layers: Of the target.
        dtype: Of weights and activations.
        device: Where the weights lie.

    Attributes:
        captured_layers: Target layers whose entering residual stream is read; empty for the state after the final norm.
        hidden_width: Elements of a row of the target's.
        embedding: The target's, or the head's own.
        lm_head: The target's, or the head's own.
        token_map: int64: the target's token of each column of the logits; None where they are the same.
    """

    def __init__(
        self,
        config: HeadConfig,
        shared: SharedWeights,
        num_target_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.captured_layers = config.captured_layers(num_target_layers)
        self.hidden_width = config.target_hidden_size * max(1, len(self.captured_layers))
        self.embedding = shared.embedding
        self.lm_head = shared.lm_head
        self.token_map = shared.token_map
        layer = config.layer
        self._dtype, self._device = dtype, device
        self._rotary = {rope: Rotary(rope, layer.head_dim, device) for rope in layer.ropes}
        self._windows = tuple(dict.fromkeys(layer.windows))
        self._group_size = layer.num_heads // layer.num_kv_heads

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and KV."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Of weights and KV."""
        return self._device

    @property
    def num_modules(self) -> int:
        """Modules that can be run one after another, each for a depth of its own."""
        return 1

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [n, hidden_width] as features [n, hidden_size]."""
        return rows

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """The memory that each tensor of a checkpoint fills, by the names of `head_loader`; shared weights are not here."""

    @abstractmethod
    def compute(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        sources: torch.Tensor | None,
        run: Pass,
        module: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the LM head reads, the features of the next rows), [kept rows, hidden_size] each; see `forward`."""

    def read(
        self, tokens: torch.Tensor, features: torch.Tensor, sources: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(embeddings, features), [num_rows, hidden_size] each, of the rows that `compute` is given."""
        if sources is not None:
            features = features.index_select(0, sources)
        return self.embedding(tokens), features

    def forward(
        self,
        batch: Batch,
        features: torch.Tensor,
        kv: PagedKV,
        attention: AttentionBackend,
        module: int = 0,
        all_features: bool = False,
        sources: torch.Tensor | None = None,
    ) -> HeadOutput:
        """Computes the batch's rows and writes their keys and values to `kv`.

        Args:
            features: [num_rows, hidden_size]: of `fuse`, or `HeadOutput.features` of the rows before.
            module: Which of `num_modules`.
            all_features: The features of all rows are wanted, not those of the rows whose logits are alone.
            sources: int64 [num_rows], the row of `features` that each row continues; None for one after another.
        """
        angles = {rope: r.angles(batch.positions, self._dtype) for rope, r in self._rotary.items()}
        plan = attention.plan(batch, kv, self._windows, self._group_size)
        run = Pass(angles, batch, kv, attention, plan, None if all_features else batch.logit_rows)
        scored, following = self.compute(batch.tokens, features, sources, run, module)
        if all_features and batch.logit_rows is not None:
            scored = scored[batch.logit_rows]
        return HeadOutput(self.lm_head(scored), following)

    def make_norm(self, size: int) -> RMSNorm:
        """A norm over `size` elements."""
        eps = self.config.layer.rms_norm_eps
        return RMSNorm(size, eps, False, self._dtype, self._device)

    def make_layer(self, index: int, input_size: int) -> HeadLayer:
        """Layer `index` of the cache."""
        return HeadLayer(self.config.layer, index, input_size, self._dtype, self._device)
