"""Draft heads: EAGLE-2 (Li et al. 2024, arXiv 2406.16858), EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and MiMo's MTP layer.

All share EAGLE's shift: slot p takes the target's feature of position p and the token of position p + 1, stands at rotary
position p, and says what comes at p + 2. A head's own output stands in for features that the target has not computed yet.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from foredraft.attention.base import AttentionBackend, Batch
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.attention import SelfAttention
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.layers.linear import Linear
from foredraft.layers.mlp import GatedMLP
from foredraft.layers.norm import RMSNorm
from foredraft.layers.rotary import Rotary
from foredraft.models.config import ModelConfig
from foredraft.models.draft_heads.config import HeadConfig


@dataclass(slots=True)
class HeadOutput:
    """What a head's forward gives for the rows whose logits are wanted.

    Attributes:
        logits: float32 [R, draft vocabulary].
        features: [R, hidden], which stand in for the target's at the next position.
    """

    logits: torch.Tensor
    features: torch.Tensor


class HeadLayer(nn.Module):
    """One decoder layer of a head.

    Args:
        input_size: Width of what its attention reads.
        has_input_norm: EAGLE's first layer reads its input as it is.
    """

    def __init__(
        self,
        config: ModelConfig,
        input_size: int,
        has_input_norm: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.attention = SelfAttention(
            input_size=input_size,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=None,
            scale=config.attention_scale,
            bias=config.attention_bias,
            output_bias=config.attention_output_bias,
            qk_norm=None,
            dtype=dtype,
            device=device,
        )
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias, dtype, device
        )  # fmt: skip
        self.attention_norm = _norm(config, dtype, device) if has_input_norm else None
        self.mlp_norm = _norm(config, dtype, device)


class DraftHead(nn.Module, ABC):
    """Base of the heads: embeds tokens, runs layers on its own paged KV, scores its outputs.

    Attributes:
        embedding: The target's, or the checkpoint's own.
        lm_head: The target's, or the checkpoint's own over a draft vocabulary.
        token_map: int64 [draft vocabulary], target ids of the logits' columns; None for all of the target's.
    """

    def __init__(
        self,
        config: HeadConfig,
        embedding: Embedding,
        lm_head: Linear,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.lm_head = lm_head
        self.token_map: torch.Tensor | None = None
        rope = config.layer.ropes[0]
        self._rotary = Rotary(rope, config.layer.head_dim, device)
        self._group_size = config.layer.num_heads // config.layer.num_kv_heads
        self.decoder_layers: list[HeadLayer] = []

    @abstractmethod
    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, input_width] hidden states of the target -> [n, hidden] features."""

    @abstractmethod
    def forward(
        self, batch: Batch, features: torch.Tensor, kv: PagedKV, attention: AttentionBackend
    ) -> HeadOutput:
        """Computes the batch's rows and writes their keys and values to `kv`.

        Args:
            features: [num_rows, hidden], of the position before each row's token.
        """

    def _run_layer(
        self,
        index: int,
        x: torch.Tensor,
        stream: torch.Tensor,
        batch: Batch,
        kv: PagedKV,
        attention: AttentionBackend,
        plan: object,
    ) -> torch.Tensor:
        """A layer around the residual stream, given what its attention reads; returns the new stream."""
        layer = self.decoder_layers[index]
        angles = self._rotary.angles(batch.positions, x.dtype)
        stream = stream + layer.attention(x, angles, index, batch, kv, attention, plan)
        return stream + layer.mlp(layer.mlp_norm(stream))

    def _plan(self, batch: Batch, kv: PagedKV, attention: AttentionBackend) -> object:
        return attention.plan(batch, kv, (None,), self._group_size)

    def _output(self, batch: Batch, scored: torch.Tensor, features: torch.Tensor) -> HeadOutput:
        if batch.logit_rows is not None:
            scored, features = scored[batch.logit_rows], features[batch.logit_rows]
        return HeadOutput(self.lm_head(scored.contiguous()).float(), features)


class EagleHead(DraftHead):
    """EAGLE and EAGLE-2: x = fc([embedding; feature]), layers without a first input norm, the target's output matrix."""

    def __init__(
        self,
        config: HeadConfig,
        embedding: Embedding,
        lm_head: Linear,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, embedding, lm_head, dtype, device)
        size = config.layer.hidden_size
        self.fc = Linear(2 * size, size, config.fc_bias, dtype, device)
        self.decoder_layers = [
            HeadLayer(config.layer, size, index > 0, dtype, device)
            for index in range(config.layer.num_layers)
        ]
        self.layers = nn.ModuleList(self.decoder_layers)

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's hidden states after its final norm are the features."""
        return hidden

    def forward(
        self, batch: Batch, features: torch.Tensor, kv: PagedKV, attention: AttentionBackend
    ) -> HeadOutput:
        """See DraftHead."""
        plan = self._plan(batch, kv, attention)
        stream = self.fc(torch.cat((self.embedding(batch.tokens), features), dim=-1))
        for index, layer in enumerate(self.decoder_layers):
            x = stream if layer.attention_norm is None else layer.attention_norm(stream)
            stream = self._run_layer(index, x, stream, batch, kv, attention, plan)
        return self._output(batch, stream, stream)


class Eagle3Head(DraftHead):
    """EAGLE-3: three residual streams fused, attention on [norm(embedding); norm(feature)], an output matrix of its own."""

    def __init__(
        self,
        config: HeadConfig,
        embedding: Embedding,
        lm_head: Linear,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, embedding, lm_head, dtype, device)
        size = config.layer.hidden_size
        self.fc = Linear(config.input_width, size, config.fc_bias, dtype, device)
        self.hidden_norm = _norm(config.layer, dtype, device)
        self.midlayer = HeadLayer(config.layer, 2 * size, True, dtype, device)
        self.norm = _norm(config.layer, dtype, device)
        self.decoder_layers = [self.midlayer]

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Projects the concatenated streams."""
        return self.fc(hidden)

    def forward(
        self, batch: Batch, features: torch.Tensor, kv: PagedKV, attention: AttentionBackend
    ) -> HeadOutput:
        """See DraftHead."""
        plan = self._plan(batch, kv, attention)
        assert self.midlayer.attention_norm is not None
        embedded = self.midlayer.attention_norm(self.embedding(batch.tokens))
        x = torch.cat((embedded, self.hidden_norm(features)), dim=-1)
        stream = self._run_layer(0, x, features, batch, kv, attention, plan)
        normed = self.norm(stream)
        return self._output(batch, normed, normed if self.config.norm_output else stream)


class MtpHead(DraftHead):
    """MiMo's MTP layer: x = input_proj([norm(feature); norm(embedding)]), a Qwen2 layer, a final norm, the target's output
    matrix; the normed output is the next feature. The embedding counts as 0 at position 0."""

    def __init__(
        self,
        config: HeadConfig,
        embedding: Embedding,
        lm_head: Linear,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, embedding, lm_head, dtype, device)
        size = config.layer.hidden_size
        self.token_norm = _norm(config.layer, dtype, device)
        self.hidden_norm = _norm(config.layer, dtype, device)
        self.input_proj = Linear(2 * size, size, False, dtype, device)
        self.layer = HeadLayer(config.layer, size, True, dtype, device)
        self.final_norm = _norm(config.layer, dtype, device)
        self.decoder_layers = [self.layer]

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's hidden states after its final norm are the features."""
        return hidden

    def forward(
        self, batch: Batch, features: torch.Tensor, kv: PagedKV, attention: AttentionBackend
    ) -> HeadOutput:
        """See DraftHead."""
        plan = self._plan(batch, kv, attention)
        embedded = self.embedding(batch.tokens) * (batch.positions != 0)[:, None]
        pair = (self.hidden_norm(features), self.token_norm(embedded))
        stream = self.input_proj(torch.cat(pair, dim=-1))
        assert self.layer.attention_norm is not None
        x = self.layer.attention_norm(stream)
        output = self.final_norm(self._run_layer(0, x, stream, batch, kv, attention, plan))
        return self._output(batch, output, output)


HEADS: dict[str, type[EagleHead] | type[Eagle3Head] | type[MtpHead]] = {
    "EAGLE": EagleHead,
    "EAGLE3": Eagle3Head,
    "MTP": MtpHead,
}


def target_lm_head(
    config: ModelConfig, embedding: Embedding, dtype: torch.dtype, device: torch.device
) -> LMHead:
    """The target's output matrix, one with `embedding` where the target ties them."""
    tied = embedding if config.tie_word_embeddings else None
    return LMHead(config.hidden_size, config.vocab_size, tied, config.logit_softcap, dtype, device)


def _norm(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, False, dtype, device)
