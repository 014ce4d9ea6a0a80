"""Keys and values of committed tokens in all layers of a block drafter, by two kernels on a GPU."""

from collections.abc import Sequence

import torch

from foredraft.kernel_launch import VARIANTS, overlapped, power_of_two
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.attention import SelfAttention
from foredraft.layers.linear import CudaMethod

MOST_ROWS = 128
_BLOCK_N = 32  # outputs of a program: an H200 is busy with those of a few layers


class ContextKeys:
    """Computes what `SelfAttention.store` does, for several layers with the same input.

    Each layer's weights are read where they lie.

    Args:
        layers: Attention blocks of one shape without biases, in the order of the cache; their
            weights are plain, of 16 bits, and on a GPU.
        num_queries: Number of outputs of `qkv` before the keys.
    """

    def __init__(self, layers: Sequence[SelfAttention], num_queries: int) -> None:
        weights = [layer.qkv.weight[num_queries:] for layer in layers]
        self._weight, self._offsets = weights[0], _offsets(weights)
        norms = [layer.k_norm for layer in layers]
        self._norm = norms[0]
        scales = [norm.weight for norm in norms if norm is not None]
        self._norm_offsets = _offsets(scales) if scales else self._offsets

    @staticmethod
    def works(layers: Sequence[SelfAttention]) -> bool:
        """Returns whether the kernels take these layers."""
        first = layers[0].qkv
        return first.weight.is_cuda and all(
            isinstance(layer.qkv.method, CudaMethod)
            and layer.qkv.bias is None
            and layer.qkv.weight.shape == first.weight.shape
            and layer.qkv.weight.dtype in (torch.bfloat16, torch.float16)
            and layer.qkv.num_inputs % 8 == 0
            for layer in layers
        )

    def takes(self, x: torch.Tensor, kv: PagedKV) -> bool:
        """Returns whether `store` takes this input [num_rows, hidden_size] and this cache."""
        is_small = 0 < len(x) <= MOST_ROWS and not VARIANTS.are_few
        return is_small and x.dtype == self._weight.dtype and not kv.is_8_bit

    def store(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        kv: PagedKV,
    ) -> None:
        """Writes the keys and values of rows [num_rows, hidden_size] to all layers of the cache.

        Args:
            angles: Angles that `rotary.Rotary` computed for the rows' positions.
            slots: int64 [num_rows], KV slots of the rows.
        """
        from draft_service.models import context_kernels as kernels

        (rows, inputs), outputs, num_layers = x.shape, len(self._weight), len(self._offsets)
        launch, (cos, sin) = overlapped(x.device), angles
        heads = x.new_empty((num_layers, rows, outputs))
        block_m = max(16, power_of_two(rows))
        block_k = 128 if block_m <= 32 else 64
        kernels.multiply_layers[(-(-outputs // _BLOCK_N), num_layers)](
            x, self._weight, self._offsets, heads, rows, outputs, inputs,
            EVEN=inputs % block_k == 0, BLOCK_N=_BLOCK_N, BLOCK_M=block_m, BLOCK_K=block_k,
            num_warps=4, num_stages=4, **launch,
        )  # fmt: skip
        head_dim, norm = kv.data.shape[-1], self._norm
        kernels.store_layers[(rows, num_layers)](
            heads, cos, sin, heads if norm is None else norm.weight, self._norm_offsets, kv.data,
            slots, rows, kv.data.stride(0), kv.data.stride(1), 0.0 if norm is None else norm.eps,
            KV_HEADS=kv.num_kv_heads, HEAD_DIM=head_dim, BLOCK_H=power_of_two(2 * kv.num_kv_heads),
            BLOCK_D=power_of_two(head_dim // 2), NORMS=norm is not None,
            FULL=norm is not None and norm.full_precision, num_warps=4, **launch,
        )  # fmt: skip


def _offsets(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns where each tensor begins behind the first, in numbers: int64 [n]."""
    first = tensors[0]
    places = [(each.data_ptr() - first.data_ptr()) // first.element_size() for each in tensors]
    return torch.tensor(places, dtype=torch.int64, device=first.device)
