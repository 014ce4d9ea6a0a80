"""A decoder, configured for Llama, Mistral, Qwen2, Qwen3, MiMo's base layers and Gemma 3."""

import functools
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from foredraft.attention.base import AttentionBackend, Batch
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.linear import Linear
from foredraft.layers.norm import RMSNorm
from foredraft.layers.normed import Normed
from foredraft.layers.parameters import Target
from foredraft.layers.rotary import Rotary
from foredraft.models.config import ModelConfig
from foredraft.models.layer_parts import layer_parts, vocabulary_method, vocabulary_targets
from foredraft.models.rope_config import RopeConfig
from foredraft.parallel.group import SINGLE, Group, local_kv_heads, share

EMBEDDING, LM_HEAD = "model.embed_tokens", "lm_head"  # names in a checkpoint
Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class ModelOutput:
    """Holds the results of a forward.

    Attributes:
        logits: [requested rows, vocab_size]; float32 on the CPU, the activations' type on a GPU.
        hidden: [num_rows, hidden_size], hidden states after the final norm.
        captured: For each requested layer, in order, its input (the residual stream) [num_rows,
            hidden_size].
        streams: [num_rows, requested layers * hidden_size], with `captured` as views; None without
            requested layers.
        layers: The requested layers.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    captured: list[torch.Tensor] = field(default_factory=list)
    streams: torch.Tensor | None = None
    layers: tuple[int, ...] = ()

    def streams_of(self, layers: tuple[int, ...]) -> torch.Tensor:
        """Returns the inputs of some of the requested layers, [num_rows, layers * hidden_size]."""
        if layers == self.layers:
            assert self.streams is not None
            return self.streams
        return torch.cat([self.captured[self.layers.index(layer)] for layer in layers], 1)


class DecoderLayer(nn.Module):
    """Attention and MLP around the residual stream; norms before each, and with `sandwich_norms`
    after each too.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
    ) -> None:
        super().__init__()
        self._group = group
        offset = config.norm_offset != 0.0

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, offset, dtype, device)

        self.attention, self.mlp = layer_parts(
            config, layer, config.hidden_size, dtype, device, group
        )
        self.attention_norm = norm()
        self.mlp_norm = norm()
        self.attention_post_norm = norm() if config.sandwich_norms else None
        self.mlp_post_norm = norm() if config.sandwich_norms else None

    def forward(
        self,
        x: Normed,
        stream: torch.Tensor,
        angles: Angles,
        layer: int,
        batch: Batch,
        kv: PagedKV,
        attention: AttentionBackend,
        plan: object,
        next_norm: RMSNorm,
        next_reader: Linear | None,
        copy: torch.Tensor | None,
    ) -> Normed:
        """Computes the next layer's input [num_rows, hidden_size].

        Adding to the stream and its next norm are one pass.

        Args:
            x: [num_rows, hidden_size], the stream after `attention_norm`.
            stream: [num_rows, hidden_size], added to in place.
            next_norm: Norm that the stream gets after this layer.
            next_reader: Layer that reads the result first; None for none that gains from it.
            copy: Second place for the stream after this layer, or None.
        """
        own, group = (angles, layer, batch, kv, attention, plan), self._group
        # No name keeps attention's result: its memory is free for the MLP.
        x = self.mlp_norm.add(
            stream,
            self.attention(x.rows, *own, later=True, rounded=x.rounded),
            self.attention_post_norm,
            None,
            group,
            self.mlp.gate_up,
        )
        delta = self.mlp(x.rows, later=True, rounded=x.rounded)
        return next_norm.add(stream, delta, self.mlp_post_norm, copy, group, next_reader)

    def targets(self, prefix: str) -> dict[str, Target]:
        """Returns the memory of the layer's weights by tensor name; names begin with `prefix`."""
        found = self.attention.targets(f"{prefix}self_attn.") | self.mlp.targets(f"{prefix}mlp.")
        norms = {"input_layernorm": self.attention_norm}
        if self.attention_post_norm is not None and self.mlp_post_norm is not None:
            norms["post_attention_layernorm"] = self.attention_post_norm
            norms["pre_feedforward_layernorm"] = self.mlp_norm
            norms["post_feedforward_layernorm"] = self.mlp_post_norm
        else:
            norms["post_attention_layernorm"] = self.mlp_norm
        for name, norm in norms.items():
            found[f"{prefix}{name}.weight"] = Target.whole(norm.weight)
        return found


class DecoderModel(nn.Module):
    """A decoder-only language model whose weights a loader fills.

    Args:
        config: Configuration of the model.
        dtype: Type of weights and activations.
        device: Device of the weights.
        group: The ranks that share its attention heads, MLPs and vocabulary.

    Attributes:
        dtype: Type of weights and activations, even where norms keep float32.
        num_kv_heads: Number of key and value heads of this rank, which determines the size of its
            cache.
        group_size: Number of this rank's query heads for each of them.
        kv_scales: float32 [num_layers, 2] on the CPU: divisors of each layer's keys and values in a
            cache of 8-bit floats; 1 where the checkpoint has none.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = SINGLE,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.kv_scales = torch.ones(config.num_layers, 2)
        sizes = config.hidden_size, config.vocab_size
        is_tied = config.tie_word_embeddings
        method = vocabulary_method(config, EMBEDDING, device, group)
        own = None if is_tied else vocabulary_method(config, LM_HEAD, device, group)
        head: LMHead | None = None
        table: Linear | None = None
        if (is_tied and method is not None) or own is not None:
            head_method = method if is_tied else own
            head = LMHead(*sizes, None, config.logit_softcap, dtype, device, group, head_method)
        if method is not None:
            table = head if is_tied else Linear(*sizes, False, dtype, device, method=method)
        self.embedding = Embedding(
            config.vocab_size,
            config.hidden_size,
            config.embedding_scale,
            dtype,
            device,
            group,
            table,
        )
        self.decoder_layers = [
            DecoderLayer(config, layer, dtype, device, group) for layer in range(config.num_layers)
        ]
        self.layers = nn.ModuleList(self.decoder_layers)
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, config.norm_offset != 0.0, dtype, device
        )
        tied = self.embedding if is_tied else None
        self.lm_head = head or LMHead(*sizes, tied, config.logit_softcap, dtype, device, group)
        self._rotary: dict[RopeConfig, Rotary] = {
            rope: Rotary(rope, config.head_dim, device) for rope in config.ropes
        }
        self._windows = tuple(dict.fromkeys(config.windows))
        self._has_repeats = True
        self.num_kv_heads = local_kv_heads(config.num_kv_heads, group)
        self.group_size = share(config.num_heads, group, "query heads") // self.num_kv_heads

    def targets(self) -> dict[str, Target]:
        """Returns the memory that each tensor of a Hugging Face checkpoint fills."""
        found = {"model.norm.weight": Target.whole(self.norm.weight)}
        config, embedding, head = self.config, self.embedding, self.lm_head
        if embedding.table is not None:
            found |= embedding.table.targets(EMBEDDING)
        else:
            found |= vocabulary_targets(config, EMBEDDING, embedding.share, embedding.weight)
        if not config.tie_word_embeddings and hasattr(head, "weight"):
            found |= vocabulary_targets(config, LM_HEAD, head.share, head.weight)
        elif not config.tie_word_embeddings:
            found |= head.targets(LM_HEAD)
        for index, layer in enumerate(self.decoder_layers):
            found |= layer.targets(f"model.layers.{index}.")
        return found

    def ignored_tensors(self) -> list[str]:
        """Returns prefixes of names of tensors that a checkpoint may have and that are not
        loaded.
        """
        ignored = ["model.mtp_layers."] if self.config.architecture == "MiMoForCausalLM" else []
        return [*ignored, "lm_head.weight"] if self.config.tie_word_embeddings else ignored

    @torch.no_grad()
    def finish_loading(self) -> None:
        """Converts loaded weights to the form that is computed with."""
        if self.config.norm_offset:
            for name, parameter in self.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.add_(self.config.norm_offset)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.norm.weight.device

    def forward(
        self,
        batch: Batch,
        kv: PagedKV,
        attention: AttentionBackend,
        capture: Sequence[int] = (),
        plan: object = None,
    ) -> ModelOutput:
        """Computes the batch's rows and writes their keys and values to `kv`.

        Args:
            capture: Layers whose entering residual stream is wanted; num_layers for what leaves the
                last one.
            plan: Result of `plan`; None to make it.
        """
        x, captured, streams = self.states(batch, kv, attention, capture, plan)
        wanted = x if batch.logit_rows is None else x[batch.logit_rows]
        return ModelOutput(self.lm_head(wanted), x, captured, streams, tuple(capture))

    def plan(self, batch: Batch, kv: PagedKV, attention: AttentionBackend) -> object:
        """Prepares attention for a batch, on the host and on the device."""
        return attention.plan(batch, kv, self._windows, self.group_size)

    def states(
        self,
        batch: Batch,
        kv: PagedKV,
        attention: AttentionBackend,
        capture: Sequence[int] = (),
        plan: object = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
        """Computes the fields of `ModelOutput` beside the logits; otherwise like `forward`."""
        first = self.decoder_layers[0]
        if batch.embeddings is None:
            stream, x = self.embedding.normed(
                batch.tokens, first.attention_norm, first.attention.qkv
            )
        else:
            stream = batch.embeddings.clone()  # layers add to it in place
            x = Normed(first.attention_norm(stream))
        angles = {
            rope: rotary.angles(batch.positions, stream.dtype, batch.reaches)
            for rope, rotary in self._rotary.items()
        }
        if plan is None:
            plan = self.plan(batch, kv, attention)
        size = self.config.hidden_size
        streams = stream.new_empty(stream.shape[0], len(capture) * size) if capture else None
        captured = [] if streams is None else list(streams.split(size, 1))
        copies = dict(zip(capture, captured, strict=True))
        if 0 in copies:
            copies[0].copy_(stream)
        after: list[tuple[RMSNorm, Linear | None]] = [
            (layer.attention_norm, layer.attention.qkv) for layer in self.decoder_layers[1:]
        ]
        after.append((self.norm, None))
        for index in self._layers_to_run(copies):
            layer, rope = self.decoder_layers[index], angles[self.config.ropes[index]]
            copy = copies.get(index + 1)
            x = layer(x, stream, rope, index, batch, kv, attention, plan, *after[index], copy)
        for layer_index, copy in zip(capture, captured, strict=True):
            if copy is not copies[layer_index]:  # asked for twice
                copy.copy_(copies[layer_index])
        return x.rows, captured, streams

    @contextmanager
    def without_repeats(self) -> Iterator[None]:
        """Leaves out layers that launch the same kernels as an earlier one.

        For runs that compile kernels and whose results nobody reads. They write the KV of some
        layers only.
        """
        self._has_repeats = False
        try:
            yield
        finally:
            self._has_repeats = True

    def _layers_to_run(self, copied: Container[int]) -> Iterable[int]:
        """Returns the indexes of the layers to compute.

        Args:
            copied: Layers whose entering residual stream is copied.
        """
        every = range(len(self.decoder_layers))
        if self._has_repeats:
            return every
        found: dict[Hashable, int] = {}
        for index in every:
            found.setdefault((self._kinds[index], index + 1 in copied), index)
        return found.values()

    @functools.cached_property
    def _kinds(self) -> list[Hashable]:
        """What selects each layer's kernels."""
        weights = [
            tuple((name, weight.shape, weight.dtype) for name, weight in layer.named_parameters())
            for layer in self.decoder_layers
        ]
        return list(zip(self.config.ropes, self.config.windows, weights, strict=True))
