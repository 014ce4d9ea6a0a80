"""The attention block of a decoder layer: projections, head norms, rotary embedding, cache, output."""

import torch
from torch import nn

from foredraft.attention.base import AttentionBackend, Batch
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers import fused
from foredraft.layers.linear import Linear
from foredraft.layers.norm import RMSNorm
from foredraft.layers.parameters import Target
from foredraft.layers.rotary import rotate
from foredraft.parallel.group import SINGLE, Group, share


class SelfAttention(nn.Module):
    """Grouped-query attention of one layer.

    Args:
        input_size: Width of what comes in, which for a draft head may differ from `hidden_size`.
        num_heads, num_kv_heads: Numbers of heads over all ranks of the group, which share them equally.
        window: Newest positions that a row sees, None for all.

    Attributes:
        qkv: Outputs are this rank's query heads, key heads and value heads.
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
        group: Group = SINGLE,
    ) -> None:
        super().__init__()
        self._num_heads = share(num_heads, group, "query heads")
        self._num_kv_heads = share(num_kv_heads, group, "key and value heads")
        self._shape = (-1, self._num_heads + 2 * self._num_kv_heads, head_dim)
        self._scale = scale
        self.window = window
        heads = {
            "q_proj": num_heads * head_dim,
            "k_proj": num_kv_heads * head_dim,
            "v_proj": num_kv_heads * head_dim,
        }
        self.qkv = Linear(input_size, heads, bias, dtype, device, "outputs", group)
        self.output = Linear(
            num_heads * head_dim,
            {"o_proj": hidden_size},
            output_bias,
            dtype,
            device,
            "inputs",
            group,
        )
        self.q_norm = RMSNorm(head_dim, *qk_norm, dtype, device) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, *qk_norm, dtype, device) if qk_norm else None

    def targets(self, prefix: str) -> dict[str, Target]:
        """The memory that each of the block's tensors in a checkpoint fills; their names begin with `prefix`."""
        found = self.qkv.targets(prefix) | self.output.targets(prefix)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                found[f"{prefix}{name}.weight"] = Target.whole(norm.weight)
        return found

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
            later: Allows the parts of `Linear.deferred` instead.
        """
        heads = self.qkv(x).view(self._shape)
        store = self._store_fused if fused.on_gpu(heads) else self._store
        queries = store(heads, angles, layer, batch, kv)
        out = x.new_empty(x.shape[0], self.output.num_inputs)
        attention.attend(plan, queries, layer, self.window, self._scale, out)
        return self.output.deferred(out) if later else self.output(out)

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
