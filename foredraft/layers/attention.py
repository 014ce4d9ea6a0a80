"""The attention block of a decoder layer: projections, head norms, rotary embedding, cache, output."""

import torch
from torch import nn

from foredraft.attention.base import AttentionBackend, Batch
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers import fused
from foredraft.layers.linear import Linear
from foredraft.layers.norm import RMSNorm
from foredraft.layers.rotary import rotate


class SelfAttention(nn.Module):
    """Grouped-query attention of one layer.

    Args:
        input_size: Width of what comes in, which for a draft head may differ from `hidden_size`.
        window: Newest positions that a row sees, None for all.

    Attributes:
        qkv: Outputs are the query heads, the key heads, the value heads.
    """

    def __init__(
        self,
        *,
        input_size: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None,
        scale: float,
        bias: bool,
        output_bias: bool,
        qk_norm: tuple[float, bool] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._shape = (-1, num_heads + 2 * num_kv_heads, head_dim)
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._scale = scale
        self.window = window
        self.qkv = Linear(
            input_size, (num_heads + 2 * num_kv_heads) * head_dim, bias, dtype, device
        )
        self.output = Linear(num_heads * head_dim, hidden_size, output_bias, dtype, device)
        self.q_norm = RMSNorm(head_dim, *qk_norm, dtype, device) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, *qk_norm, dtype, device) if qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        layer: int,
        batch: Batch,
        kv: PagedKV,
        attention: AttentionBackend,
        plan: object,
        later: bool = False,
    ) -> torch.Tensor:
        """[num_rows, input_size] -> [num_rows, hidden_size].

        Args:
            angles: Of `rotary.Rotary`, for the batch's positions.
            layer: Of the cache.
            later: Allows the parts of `Linear.sum_later` instead.
        """
        heads = self.qkv(x).view(self._shape)
        store = self._store_fused if fused.on_gpu(heads) else self._store
        queries = store(heads, angles, layer, batch, kv)
        out = x.new_empty(x.shape[0], self.output.weight.shape[1])
        attention.attend(plan, queries, layer, self.window, self._scale, out)
        return self.output.sum_later(out) if later else self.output(out)

    def _store(
        self,
        heads: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        layer: int,
        batch: Batch,
        kv: PagedKV,
    ) -> torch.Tensor:
        """Puts the rows' keys and values into the cache; returns the queries."""
        q_and_k = heads[:, : self._num_heads + self._num_kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(heads[:, : self._num_heads])
            k = self.k_norm(q_and_k[:, self._num_heads :])
            q_and_k = torch.cat((q, k), 1)
        rotated = rotate(q_and_k, *angles)
        # Keys go back beside their values, so that the cache takes both at once.
        heads[:, self._num_heads : -self._num_kv_heads].copy_(rotated[:, self._num_heads :])
        kv.write(layer, batch.slots, heads[:, self._num_heads :])
        return rotated[:, : self._num_heads]

    def _store_fused(
        self,
        heads: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        layer: int,
        batch: Batch,
        kv: PagedKV,
    ) -> torch.Tensor:
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm, self.k_norm
            norms = (q.weight, k.weight, q.eps, q.full_precision)
        keys, values = kv.keys(layer), kv.values(layer)
        return fused.rotate_and_store(
            heads, self._num_heads, angles, norms, keys, values, batch.slots, kv.scales[layer]
        )
