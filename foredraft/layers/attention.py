"""The attention block of a decoder layer: projections, head norms, rotary embedding, cache,
output.
"""

import torch
from torch import nn

from foredraft.attention.base import AttentionBackend, Batch, WantedRows
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.heads import Heads
from foredraft.layers.linear import Linear, MethodChoice, plain_weights
from foredraft.layers.norm import RMSNorm
from foredraft.layers.normed import RoundedRows
from foredraft.layers.padded_rows import new_rows
from foredraft.layers.parameters import Target
from foredraft.layers.rotary import rotate
from foredraft.layers.row_kernels import RowKernels, kernels_for
from foredraft.parallel.group import SINGLE, Group, local_kv_heads, replicas, share


class SelfAttention(nn.Module):
    """Grouped-query attention of one layer.

    Args:
        input_size: Width of the input; for a draft head it may differ from `hidden_size`.
        num_heads, num_kv_heads: Numbers of heads over all ranks of the group, which share them
            equally. Where there are fewer key and value heads than ranks, several ranks hold the
            same one.
        window: Number of newest positions that a row sees, None for all.
        methods: Selects the form in which the weights of each matrix are kept.

    Attributes:
        qkv: Projection whose outputs are this rank's query heads, key heads and value heads.
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
        methods: MethodChoice = plain_weights,
    ) -> None:
        super().__init__()
        self._num_heads = share(num_heads, group, "query heads")
        self._num_kv_heads = local_kv_heads(num_kv_heads, group)
        self._shape = (-1, self._num_heads + 2 * self._num_kv_heads, head_dim)
        self._queries = (self._num_heads, head_dim)
        self._scale = scale
        self.window = window
        heads = {
            "q_proj": num_heads * head_dim,
            "k_proj": num_kv_heads * head_dim,
            "v_proj": num_kv_heads * head_dim,
        }
        copies = dict.fromkeys(("k_proj", "v_proj"), replicas(num_kv_heads, group))
        self.qkv = Linear(
            input_size, heads, bias, dtype, device, "outputs", group, methods(heads), copies
        )
        output = {"o_proj": hidden_size}
        self.output = Linear(
            num_heads * head_dim,
            output,
            output_bias,
            dtype,
            device,
            "inputs",
            group,
            methods(output),
        )
        self.q_norm = RMSNorm(head_dim, *qk_norm, dtype, device) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, *qk_norm, dtype, device) if qk_norm else None

    def targets(self, prefix: str) -> dict[str, Target]:
        """Returns the memory of the block's weights by tensor name; names begin with `prefix`."""
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
        rounded: RoundedRows | None = None,
        wanted: WantedRows | None = None,
    ) -> torch.Tensor:
        """Computes attention, [num_rows, input_size] -> [num_rows or wanted rows, hidden_size].

        Args:
            angles: Angles that `rotary.Rotary` computed for the batch's positions.
            layer: Index of the layer in the cache.
            later: Whether the result may be the parts of `Linear.deferred`.
            rounded: See `Linear.deferred`.
            wanted: Rows to return; None for all.
        """
        queries = self._make_queries(x, angles, layer, batch, kv, rounded)
        if wanted is not None:
            queries, plan = queries[wanted.index], wanted.plan
        out = new_rows(x, queries.shape[0], self.output.num_inputs)
        attention.attend(plan, queries, layer, self.window, self._scale, out)
        return self.output.deferred(out) if later else self.output(out)

    def _make_queries(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        layer: int,
        batch: Batch,
        kv: PagedKV,
        rounded: RoundedRows | None,
    ) -> torch.Tensor:
        """Writes the rows' keys and values to the cache; returns the queries."""
        place = _place(self._num_heads, angles, layer, batch.slots, kv)
        if self.q_norm is None and self.qkv.method.has_heads:
            found = self.qkv.heads(x, rounded, place)
            if found is not None:
                return found
        heads = self.qkv.deferred(x, rounded)
        # Only products on GPUs come in parts, and their kernels add them up.
        own = x.new_empty(x.shape[0], *self._queries) if heads.dim() == 3 else None
        heads = heads.view(*heads.shape[:-2], *self._shape)
        if (kernels := kernels_for(heads, kv.data)) is None:
            return self._store(heads, angles, layer, batch, kv)
        return self._store_fused(kernels, heads, place, own)

    def store(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        layer: int,
        slots: torch.Tensor,
        kv: PagedKV,
    ) -> None:
        """Writes the keys and values of rows [num_rows, input_size] to the cache, without
        attention.

        Args:
            angles: Angles that `rotary.Rotary` computed for the rows' positions.
            layer: Index of the layer in the cache.
            slots: int64 [num_rows], KV slots of the rows.
        """
        head_dim = self._shape[2]
        num_queries = self._num_heads * head_dim
        heads = self.qkv.outputs_from(x, num_queries).view(-1, 2 * self._num_kv_heads, head_dim)
        if (kernels := kernels_for(heads, kv.data)) is not None:
            self._store_fused(kernels, heads, _place(0, angles, layer, slots, kv))
            return
        keys = heads[:, : self._num_kv_heads]
        if self.k_norm is not None:
            keys = self.k_norm(keys)
        heads[:, : self._num_kv_heads] = rotate(keys, *angles)
        kv.write(layer, slots, heads)

    def _store(
        self,
        heads: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        layer: int,
        batch: Batch,
        kv: PagedKV,
    ) -> torch.Tensor:
        """Writes the rows' keys and values to the cache; returns the queries."""
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
        kernels: RowKernels,
        heads: torch.Tensor,
        place: Heads,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k = self.q_norm, self.k_norm
        norms = None
        if q is not None and k is not None:
            norms = q.weight, k.weight, q.eps, q.full_precision
        return kernels.rotate_and_store(heads, place, norms, queries=queries)


def _place(
    num_heads: int,
    angles: tuple[torch.Tensor, torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    kv: PagedKV,
) -> Heads:
    """Returns where a layer's heads go."""
    return Heads(num_heads, angles, kv.keys(layer), kv.values(layer), slots, kv.scales[layer])
