"""One decoder for Llama, Mistral, Qwen2, Qwen3, MiMo's base layers and Gemma 3, told apart by configuration alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from foredraft.attention.base import AttentionBackend, Batch
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.norm import RMSNorm
from foredraft.layers.parameters import Target
from foredraft.layers.rotary import Rotary
from foredraft.models.config import ModelConfig
from foredraft.models.layer_parts import layer_parts
from foredraft.models.rope_config import RopeConfig
from foredraft.parallel.group import SINGLE, Group

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class ModelOutput:
    """What a forward gives.

    Attributes:
        logits: [the rows asked for, vocab_size]; float32 on the CPU, of the activations' type on a GPU.
        hidden: [num_rows, hidden_size], after the final norm.
        captured: For each layer asked for, in the order asked, the residual stream that enters it [num_rows, hidden_size].
        streams: [num_rows, layers asked for * hidden_size], of which `captured` are views; None where none are asked for.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    captured: list[torch.Tensor] = field(default_factory=list)
    streams: torch.Tensor | None = None


class DecoderLayer(nn.Module):
    """Attention and MLP around the residual stream; norms before each, and with `sandwich_norms` after each too."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
    ) -> None:
        super().__init__()
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
        x: torch.Tensor,
        stream: torch.Tensor,
        angles: Angles,
        layer: int,
        batch: Batch,
        kv: PagedKV,
        attention: AttentionBackend,
        plan: object,
        next_norm: RMSNorm,
        copy: torch.Tensor | None,
    ) -> torch.Tensor:
        """What the next layer reads [num_rows, hidden_size]: adding to the stream and its next norm are one pass.

        Args:
            x: [num_rows, hidden_size], the stream after `attention_norm`.
            stream: [num_rows, hidden_size], added to in place.
            next_norm: Of the stream that leaves.
            copy: Where the stream that leaves goes too, or None.
        """
        x = self.attention(x, angles, layer, batch, kv, attention, plan, later=True)
        x = self.mlp(self.mlp_norm.add(stream, x, self.attention_post_norm), later=True)
        return next_norm.add(stream, x, self.mlp_post_norm, copy)

    def targets(self, prefix: str) -> dict[str, Target]:
        """The memory that each of the layer's tensors in a checkpoint fills; their names begin with `prefix`."""
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
        config: What it is.
        dtype: Of weights and activations.
        device: Where the weights lie.
        group: The ranks that share its attention heads and MLPs.

    Attributes:
        kv_scales: float32 [num_layers, 2] on the CPU: by which each layer's keys and values are to be divided in a cache of 8-bit
            floats; 1 where the checkpoint does not say.
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
        self.kv_scales = torch.ones(config.num_layers, 2)
        self.embedding = Embedding(
            config.vocab_size, config.hidden_size, config.embedding_scale, dtype, device
        )
        self.decoder_layers = [
            DecoderLayer(config, layer, dtype, device, group) for layer in range(config.num_layers)
        ]
        self.layers = nn.ModuleList(self.decoder_layers)
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, config.norm_offset != 0.0, dtype, device
        )
        self.lm_head = LMHead(
            config.hidden_size,
            config.vocab_size,
            self.embedding if config.tie_word_embeddings else None,
            config.logit_softcap,
            dtype,
            device,
        )
        self._rotary: dict[RopeConfig, Rotary] = {
            rope: Rotary(rope, config.head_dim, device) for rope in config.ropes
        }
        self._windows = tuple(dict.fromkeys(config.windows))
        self._group_size = config.num_heads // config.num_kv_heads

    def targets(self) -> dict[str, Target]:
        """The memory that each tensor of a Hugging Face checkpoint fills."""
        found = {
            "model.embed_tokens.weight": Target.whole(self.embedding.weight),
            "model.norm.weight": Target.whole(self.norm.weight),
        }
        if not self.config.tie_word_embeddings:
            found["lm_head.weight"] = Target.whole(self.lm_head.weight)
        for index, layer in enumerate(self.decoder_layers):
            found |= layer.targets(f"model.layers.{index}.")
        return found

    def ignored_tensors(self) -> list[str]:
        """Beginnings of names of a checkpoint's tensors that are known and not wanted."""
        ignored = ["model.mtp_layers."] if self.config.architecture == "MiMoForCausalLM" else []
        return [*ignored, "lm_head.weight"] if self.config.tie_word_embeddings else ignored

    @torch.no_grad()
    def finish_loading(self) -> None:
        """Brings weights that a checkpoint has filled into the form that is computed with."""
        if self.config.norm_offset:
            for name, parameter in self.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.add_(self.config.norm_offset)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.embedding.weight.device

    def forward(
        self,
        batch: Batch,
        kv: PagedKV,
        attention: AttentionBackend,
        capture: Sequence[int] = (),
    ) -> ModelOutput:
        """Computes the batch's rows and writes their keys and values to `kv`.

        Args:
            capture: Layers whose entering residual stream is wanted; num_layers for what leaves the last one.
        """
        x, captured, streams = self.states(batch, kv, attention, capture)
        wanted = x if batch.logit_rows is None else x[batch.logit_rows]
        return ModelOutput(self.lm_head(wanted), x, captured, streams)

    def states(
        self,
        batch: Batch,
        kv: PagedKV,
        attention: AttentionBackend,
        capture: Sequence[int] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
        """As `forward`, up to the LM head: what `ModelOutput` has beside the logits."""
        if batch.embeddings is None:
            stream = self.embedding(batch.tokens)
        else:
            stream = batch.embeddings.clone()  # layers add to it in place
        angles = {
            rope: rotary.angles(batch.positions, stream.dtype, batch.reaches)
            for rope, rotary in self._rotary.items()
        }
        plan = attention.plan(batch, kv, self._windows, self._group_size)
        size = self.config.hidden_size
        streams = stream.new_empty(stream.shape[0], len(capture) * size) if capture else None
        captured = [] if streams is None else list(streams.split(size, 1))
        copies = dict(zip(capture, captured, strict=True))
        if 0 in copies:
            copies[0].copy_(stream)
        norms = [layer.attention_norm for layer in self.decoder_layers[1:]] + [self.norm]
        x = self.decoder_layers[0].attention_norm(stream)
        for index, (layer, next_norm) in enumerate(zip(self.decoder_layers, norms, strict=True)):
            rope = angles[self.config.ropes[index]]
            copy = copies.get(index + 1)
            x = layer(x, stream, rope, index, batch, kv, attention, plan, next_norm, copy)
        for layer_index, copy in zip(capture, captured, strict=True):
            if copy is not copies[layer_index]:  # asked for twice
                copy.copy_(copies[layer_index])
        return x, captured, streams
