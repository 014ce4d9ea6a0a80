"""A decoder, configured for Llama, Mistral, Qwen2, Qwen3, MiMo's base layers and Gemma 3."""

import functools
import math
from collections.abc import Container, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from foredraft.attention.base import AttentionBackend, Batch, WantedRows
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.linear import Linear
from foredraft.layers.norm import RMSNorm
from foredraft.layers.normed import Normed
from foredraft.layers.padded_rows import proven_size, timed_size, with_more
from foredraft.layers.parameters import Target
from foredraft.layers.rotary import Rotary
from foredraft.models.config import ModelConfig
from foredraft.models.decoder_layer import Angles, DecoderLayer, Part
from foredraft.models.layer_parts import vocabulary_method, vocabulary_targets
from foredraft.models.rope_config import RopeConfig
from foredraft.parallel.group import SINGLE, Group, SumGroup, local_kv_heads, share

EMBEDDING, LM_HEAD = "model.embed_tokens", "lm_head"  # names in a checkpoint
# Multiplications of a rank in a layer from which on its halves are computed in turns: with fewer a
# busy host takes longer to launch twice as many kernels than they run.
HALVED_PRODUCTS = 84 * 10**10
FP8_TIME = 0.6  # of a product of 8-bit floats, in that of one of 16-bit floats


@dataclass(slots=True)
class ModelOutput:
    """Holds the results of a forward.

    Attributes:
        logits: [requested rows, vocab_size]; float32 on the CPU, the activations' type on a GPU.
        hidden: [num_rows, hidden_size], hidden states after the final norm; of the requested rows
            alone where the forward was not asked for all.
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
        self._group = group
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
        plan: Sequence[Part] | None = None,
        all_hidden: bool = True,
    ) -> ModelOutput:
        """Computes the batch's rows and writes their keys and values to `kv`.

        Args:
            capture: Layers whose entering residual stream is wanted; num_layers for what leaves the
                last one.
            plan: Result of `plan`, made for the same arguments; None to make it.
            all_hidden: Whether hidden states of all rows are wanted. Without them a prompt, whose
                last row alone has logits, is spared most of the last layer.
        """
        if plan is None:
            plan = self.plan(batch, kv, attention, capture, all_hidden)
        x, captured, streams = self.states(batch, kv, attention, capture, plan)
        is_picked = batch.logit_rows is None or plan[0].wanted is not None
        logits = self._logits(x if is_picked else x[batch.logit_rows], batch.plan is not None)
        return ModelOutput(logits, x, captured, streams, tuple(capture))

    def _logits(self, x: torch.Tensor, is_captured: bool) -> torch.Tensor:
        """Computes logits of rows [n, hidden_size]; captured steps have few numbers of rows."""
        num_rows = x.shape[0]
        if num_rows and not is_captured:
            x = with_more(x, timed_size(num_rows, x.device))
        return self.lm_head(x)[:num_rows]

    def reserve(self, num_rows: int) -> None:
        """Reserves memory for forwards of up to so many rows where ranks compute halves in turns;
        all ranks call this.
        """
        if num_rows >= self._halved_rows:
            self._group.reserve(num_rows, self.config.hidden_size, self.dtype)

    @property
    def halved_rows(self) -> int | None:
        """Number of a forward's rows from which on its halves are computed in turns, see
        `Group.halves`; None where they never are.
        """
        return None if self._group.halves(self.dtype) is None else self._halved_rows

    @functools.cached_property
    def layer_products(self) -> int:
        """Number of this rank's multiplications of a row in the products of a layer."""
        attention, mlp = self.decoder_layers[0].attention, self.decoder_layers[0].mlp
        matrices = attention.qkv, attention.output, mlp.gate_up, mlp.down
        return sum(each.num_outputs * each.num_inputs for each in matrices)

    @functools.cached_property
    def _halved_rows(self) -> int:
        quantization, products = self.config.quantization, float(self.layer_products)
        if quantization is not None and quantization.kind == "fp8":
            products *= FP8_TIME
        return max(2, math.ceil(HALVED_PRODUCTS / products))

    def plan(
        self,
        batch: Batch,
        kv: PagedKV,
        attention: AttentionBackend,
        capture: Sequence[int] = (),
        all_hidden: bool = True,
    ) -> Sequence[Part]:
        """Prepares a batch, on the host and on the device: what is computed together.

        Args:
            capture, all_hidden: See `forward`.
        """
        reads_end = all_hidden or len(self.decoder_layers) in capture
        picks = batch.wants_few and not reads_end
        shares: Sequence[tuple[Batch, SumGroup]] = [(batch, self._group)]
        halves = self._group.halves(self.dtype) if batch.plan is None else None
        if halves is not None and batch.num_rows >= self._halved_rows:
            both = batch.halves(proven_size(-(-batch.num_rows // 2)))
            shares = list(zip(both, halves, strict=True))
        found, first = [], 0
        for rows, group in shares:
            plan = attention.plan(rows, kv, self._windows, self.group_size)
            wanted = None
            if picks and rows.logit_rows is not None:
                least = timed_size(len(rows.logit_rows), rows.logit_rows.device)
                index, last = rows.wanted(least)
                plan_of_last = attention.plan(last, kv, self.config.windows[-1:], self.group_size)
                wanted = WantedRows(index, plan_of_last)
            found.append(Part(first, rows, kv, attention, plan, group, wanted))
            first += rows.num_rows
        return found

    def states(
        self,
        batch: Batch,
        kv: PagedKV,
        attention: AttentionBackend,
        capture: Sequence[int] = (),
        plan: Sequence[Part] | None = None,
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
        size = self.config.hidden_size
        streams = stream.new_empty(stream.shape[0], len(capture) * size) if capture else None
        captured = [] if streams is None else list(streams.split(size, 1))
        copies = dict(zip(capture, captured, strict=True))
        if 0 in copies:
            copies[0].copy_(stream)
        parts = self.plan(batch, kv, attention, capture) if plan is None else plan
        if len(parts) == 1:
            runs = [self._layers(parts[0], x, stream, angles, copies)]
        else:
            runs = [
                self._layers(
                    part,
                    Normed(part.of(x.rows)),
                    part.of(stream),
                    {rope: (part.of(cos), part.of(sin)) for rope, (cos, sin) in angles.items()},
                    {layer: part.of(copy) for layer, copy in copies.items()},
                )
                for part in parts
            ]
        del x  # its memory is free after the first layer
        hidden = _joined(runs)
        for layer_index, copy in zip(capture, captured, strict=True):
            if copy is not copies[layer_index]:  # asked for twice
                copy.copy_(copies[layer_index])
        return hidden, captured, streams

    def _layers(
        self,
        part: Part,
        x: Normed,
        stream: torch.Tensor,
        angles: Mapping[RopeConfig, Angles],
        copies: Mapping[int, torch.Tensor],
    ) -> Generator[None, None, torch.Tensor]:
        """Computes the hidden states of a part's rows, in two steps for each layer."""
        after: list[tuple[RMSNorm, Linear | None]] = [
            (layer.attention_norm, layer.attention.qkv) for layer in self.decoder_layers[1:]
        ]
        after.append((self.norm, None))
        last = len(self.decoder_layers) - 1
        for index in self._layers_to_run(copies, part.wanted is not None):
            layer, rope = self.decoder_layers[index], angles[self.config.ropes[index]]
            copy, wanted = copies.get(index + 1), part.wanted if index == last else None
            x = yield from layer(x, stream, rope, part, *after[index], copy, wanted)
        logit_rows = part.batch.logit_rows
        if part.wanted is None or logit_rows is None:
            return x.rows
        return x.rows[: len(logit_rows)]  # without rows that nobody reads

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

    def _layers_to_run(self, copied: Container[int], picks: bool) -> Iterable[int]:
        """Returns the indexes of the layers to compute.

        Args:
            copied: Layers whose entering residual stream is copied.
            picks: Whether the last layer returns some rows alone.
        """
        every = range(len(self.decoder_layers))
        if self._has_repeats:
            return every
        found: dict[Hashable, int] = {}
        for index in every:
            picks_here = picks and index == every[-1]
            found.setdefault((self._kinds[index], index + 1 in copied, picks_here), index)
        return found.values()

    @functools.cached_property
    def _kinds(self) -> list[Hashable]:
        """What selects each layer's kernels."""
        weights = [
            tuple((name, weight.shape, weight.dtype) for name, weight in layer.named_parameters())
            for layer in self.decoder_layers
        ]
        return list(zip(self.config.ropes, self.config.windows, weights, strict=True))


def _joined(runs: Sequence[Generator[None, None, torch.Tensor]]) -> torch.Tensor:
    """Runs generators in turns, each up to its next yield, and joins the rows that they return; all
    yield equally often.
    """
    found: list[torch.Tensor] = []
    while not found:
        for run in runs:
            try:
                next(run)
            except StopIteration as end:
                found.append(end.value)
    return found[0] if len(found) == 1 else torch.cat(found)
