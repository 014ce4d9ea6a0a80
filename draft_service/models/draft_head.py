"""Base of draft heads: layers that continue a target's hidden states with its embedding and LM
head.

A row of a head pairs the hidden state of position p, computed by the target or by the head, with
the token at p + 1. The row stands at position p, and its logits are about the token at p + 2.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from draft_service.models.head_forms import HeadForms
from foredraft.attention.base import AttentionBackend, Batch
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.fusion import Fusion
from foredraft.layers.linear import Linear, MethodChoice
from foredraft.layers.norm import RMSNorm
from foredraft.layers.parameters import Target
from foredraft.layers.rotary import Rotary
from foredraft.models.config import ModelConfig
from foredraft.models.head_config import HeadConfig
from foredraft.models.layer_parts import layer_parts
from foredraft.models.rope_config import RopeConfig

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class SharedWeights:
    """Weights of the target that a head uses.

    Attributes:
        embedding: Embedding with unscaled rows.
        lm_head: LM head over the columns of `token_map`.
        token_map: int64, the target's token of each column, in any order; None for all tokens.
    """

    embedding: Embedding
    lm_head: LMHead
    token_map: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Everything that a head is built from, but its own weights.

    Attributes:
        config: Configuration of the head.
        shared: Embedding and LM head of the target.
        num_target_layers: Number of layers of the target.
        dtype: Type of weights and activations.
        device: Device of the weights.
        layout: Shapes of the checkpoint's tensors by our names, which decide what config.json
            leaves open; empty where weights are made up.
    """

    config: HeadConfig
    shared: SharedWeights
    num_target_layers: int
    dtype: torch.dtype
    device: torch.device
    layout: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class HeadOutput:
    """Holds the results of a forward.

    Attributes:
        logits: [requested rows, columns of `DraftHead.token_map`]; float32 on the CPU, the
            activations' type on a GPU.
        features: [rows, hidden_size], features that following rows continue; for the requested
            rows, or for all rows on request.
    """

    logits: torch.Tensor
    features: torch.Tensor


@dataclass(slots=True)
class Pass:
    """Holds the inputs that all layers of one forward share.

    Attributes:
        kept_rows: int64, rows that the last layer returns; None for all. Other rows only write keys
            and values.
    """

    angles: Mapping[RopeConfig, Angles]
    batch: Batch
    kv: PagedKV
    attention: AttentionBackend
    plan: object
    kept_rows: torch.Tensor | None


class HeadLayer(nn.Module):
    """Attention and MLP of a head, around its residual stream.

    The head decides what is normalised before attention.

    Args:
        layer: Index of the layer in the cache.
        input_size: Width of attention's input.
        forms: Selects the form of the weights of a part, see `layer_parts`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        input_size: int,
        dtype: torch.dtype,
        device: torch.device,
        forms: Callable[[str], MethodChoice],
    ) -> None:
        super().__init__()
        self._index = layer
        self._rope = config.ropes[layer]
        self.attention, self.mlp = layer_parts(
            config, layer, input_size, dtype, device, forms=forms
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, False, dtype, device)

    def targets(self, prefix: str, has_one_qkv: bool = False) -> dict[str, Target]:
        """Returns the memory of the weights of attention, MLP and the norm between them, by tensor
        name; names begin with `prefix`.

        Args:
            has_one_qkv: Whether queries, keys and values are one tensor in the checkpoint.
        """
        own, qkv = f"{prefix}self_attn.", self.attention.qkv
        found = self.attention.targets(own) | self.mlp.targets(f"{prefix}mlp.")
        found[f"{prefix}post_attention_layernorm.weight"] = Target.whole(self.mlp_norm.weight)
        if has_one_qkv:
            parts = tuple(f"{own}{part}_proj." for part in "qkv")
            found = {name: one for name, one in found.items() if not name.startswith(parts)}
            found[f"{own}qkv_proj.weight"] = Target.whole(qkv.weight)
            if qkv.bias is not None:
                found[f"{own}qkv_proj.bias"] = Target.whole(qkv.bias)
        return found

    def forward(
        self,
        x: torch.Tensor,
        stream: torch.Tensor,
        run: Pass,
        is_last: bool,
        next_norm: RMSNorm | None,
        owns_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the stream [num_rows, hidden_size] after the layer, and its norm; in the
        last layer only for the kept rows.

        Args:
            x: [num_rows, input_size], input of attention.
            stream: [num_rows, hidden_size], left unchanged unless `owns_stream`.
            next_norm: Norm to apply to the stream after the layer; None for none.
            owns_stream: Whether the layer may write to `stream`; all rows are kept then.
        """
        angles = run.angles[self._rope]
        if owns_stream and next_norm is not None:
            own = self._index, run.batch, run.kv, run.attention, run.plan
            x = self.mlp_norm.add(stream, self.attention(x, angles, *own, later=True)).rows
            return stream, next_norm.add(stream, self.mlp(x, later=True)).rows
        # The sum may overwrite attention's result, which nothing else reads.
        out = self.attention(x, angles, self._index, run.batch, run.kv, run.attention, run.plan)
        if is_last and run.kept_rows is not None:
            out, stream = out[run.kept_rows], stream[run.kept_rows]
        delta = self.mlp(self.mlp_norm.add(out, stream).rows, later=next_norm is not None)
        if next_norm is None:
            out.add_(delta)
            return out, out
        return out, next_norm.add(out, delta).rows


class DraftHead(nn.Module, ABC):
    """Base of all models that draft from a target's hidden states.

    Args:
        spec: Everything that the head is built from.

    Attributes:
        captured_layers: Target layers whose input (the residual stream) is read; empty for the
            state after the final norm.
        hidden_width: Number of elements of one row of the target's hidden states.
        embedding: The target's embedding, or the head's own.
        lm_head: The target's LM head, or the head's own.
        token_map: int64, the target's token of each column of the logits; None where columns equal
            tokens.
        fusion: The projection that `fuse` applies; None where it applies none.
    """

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        config, shared, device = spec.config, spec.shared, spec.device
        self.config = config
        self._layout = spec.layout
        self._forms = HeadForms(config.layer.quantization, spec.layout, device)
        self.fusion: Fusion | None = None
        self.captured_layers = config.captured_layers(spec.num_target_layers)
        self.hidden_width = config.target_hidden_size * max(1, len(self.captured_layers))
        self.embedding = shared.embedding
        self.lm_head = shared.lm_head
        self.token_map = shared.token_map
        layer = config.layer
        self._dtype, self._device = spec.dtype, device
        self._rotary = {rope: Rotary(rope, layer.head_dim, device) for rope in layer.ropes}
        self._windows = tuple(dict.fromkeys(layer.windows))
        self._group_size = layer.num_heads // layer.num_kv_heads

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations and KV."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Device of weights and KV."""
        return self._device

    @property
    def num_modules(self) -> int:
        """Number of modules that can run one after another, each for its own depth."""
        return 1

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """Projects the target's hidden states [n, hidden_width] to features [n, hidden_size]."""
        return rows if self.fusion is None else self.fusion(rows)

    @abstractmethod
    def targets(self) -> dict[str, Target]:
        """Returns the memory that each checkpoint tensor fills, by the names of `head_loader`;
        shared weights are not included. A loader calls it once.
        """

    def make_lm_head(self, is_tied: bool = False) -> bool:
        """Creates an LM head of the head's own where it has one; returns whether it has.

        Args:
            is_tied: Whether a smaller vocabulary has no LM head but the embedding.
        """
        layer, (stored, *_) = self.config.layer, self._layout.get("lm_head.weight", (None,))
        vocab = self.config.draft_vocab_size or stored or layer.vocab_size
        has_own = stored is not None or (vocab != layer.vocab_size and not is_tied)
        if has_own:
            size = layer.hidden_size
            self.lm_head = LMHead(size, vocab, None, None, self._dtype, self._device)
            self.token_map = None  # head_loader sets it
        return has_own

    def make_norm(self, size: int) -> RMSNorm:
        """Creates a norm over `size` elements."""
        eps = self.config.layer.rms_norm_eps
        return RMSNorm(size, eps, False, self._dtype, self._device)

    def make_layer(self, index: int, input_size: int, prefix: str = "layers.") -> HeadLayer:
        """Creates layer `index` of the cache; its tensors' names begin with `prefix`."""

        def forms(part: str) -> MethodChoice:
            return self._forms.of(f"{prefix}{index}.{part}")

        return HeadLayer(self.config.layer, index, input_size, self._dtype, self._device, forms)

    def make_linear(self, name: str, num_inputs: int, num_outputs: int, bias: bool) -> Linear:
        """Creates a matrix of its own, `name` in the checkpoint."""
        method = self._forms.of("")([name])
        return Linear(num_inputs, num_outputs, bias, self._dtype, self._device, method=method)

    def layer_targets(self, prefix: str, layer: HeadLayer) -> dict[str, Target]:
        """Returns a layer's targets, with queries, keys and values as the checkpoint has them."""
        return layer.targets(prefix, f"{prefix}self_attn.qkv_proj.weight" in self._layout)

    def angles(self, positions: torch.Tensor) -> dict[RopeConfig, Angles]:
        """Computes the angles of rows at `positions` int64 [n], for every kind of rotary
        embedding of the layers.
        """
        return {rope: r.angles(positions, self._dtype) for rope, r in self._rotary.items()}

    def plan(self, batch: Batch, kv: PagedKV, attention: AttentionBackend) -> object:
        """Prepares the data that the attention of all layers of one forward reads."""
        return attention.plan(batch, kv, self._windows, self._group_size)


class LevelHead(DraftHead):
    """Base of heads that continue their own output, level by level."""

    @abstractmethod
    def compute(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        sources: torch.Tensor | None,
        run: Pass,
        module: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (input of the LM head, features of the next rows), [kept rows, hidden_size]
        each; see `forward`.
        """

    def read(
        self, tokens: torch.Tensor, features: torch.Tensor, sources: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (embeddings, features), [num_rows, hidden_size] each, of the rows that
        `compute` gets.
        """
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
            features: [num_rows, hidden_size], from `fuse`, or `HeadOutput.features` of the previous
                rows.
            module: Index of the module, below `num_modules`.
            all_features: Whether to return the features of all rows, instead of those with logits.
            sources: int64 [num_rows], the row of `features` that each row continues; None for one
                after another.
        """
        plan = self.plan(batch, kv, attention)
        kept_rows = None if all_features else batch.logit_rows
        run = Pass(self.angles(batch.positions), batch, kv, attention, plan, kept_rows)
        scored, following = self.compute(batch.tokens, features, sources, run, module)
        if all_features and batch.logit_rows is not None:
            scored = scored[batch.logit_rows]
        return HeadOutput(self.lm_head(scored), following)
