"""The KV tensors of one model, in pages.

`page_pool` keeps which sequence owns which page.
"""

import math
import mmap
from collections.abc import Sequence
from typing import Protocol

import torch

Scales = tuple[float, float]  # factors of a layer's keys and values
_LEAST_MAPPED = 1 << 20  # bytes on a CPU from which on memory is mapped for zeros


class KVShape(Protocol):
    """Fields of a model's configuration that determine the size of its KV cache."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class PagedKV:
    """Holds keys and values of all layers, addressed by slot = page * page_size + offset.

    A head's slots lie one after another, so that the keys of consecutive pages are a view. Pages
    `num_pages` .. `num_pages + num_scratch_pages - 1` are scratch: no page table of the pool names
    them.

    An 8-bit float type keeps numbers divided by their layer's scale, those beyond its range as the
    largest it has; who reads multiplies. As a row's keys and values are read from here alone, by
    itself too, all rows see the same rounded numbers.

    Args:
        num_pages: Pages that the pool hands out.
        page_size: Tokens in a page.
        dtype: Any float type; rows are converted when they are written.
        num_scratch_pages: Pages after the pool's, for rows that are never committed.
        scales: One per layer, for 8-bit types alone; all 1 if None.

    Attributes:
        data: [num_layers, 2 * num_kv_heads, num_slots, head_dim]; a layer's keys, then its values.
        scales: One per layer; what stored numbers are to be multiplied with.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_scratch_pages: int = 0,
        scales: Sequence[Scales] | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_scratch_pages = num_scratch_pages
        self.num_kv_heads = num_kv_heads
        num_slots = (num_pages + num_scratch_pages) * page_size
        # Zeros, not empty: a masked key has weight 0, and 0 times uninitialised memory may
        # be NaN.
        shape = num_layers, 2 * num_kv_heads, num_slots, head_dim
        self.data = _zeros(shape, dtype, torch.device(device))
        self.scales = tuple(scales) if scales is not None else ((1.0, 1.0),) * num_layers
        self._keys = tuple(layer[:num_kv_heads] for layer in self.data)
        self._values = tuple(layer[num_kv_heads:] for layer in self.data)
        # torch moves no 8-bit floats by index, but it moves bytes.
        self._movable = self.data.view(torch.uint8) if self.is_8_bit else self.data
        self._layers = tuple(self._movable)
        self._inverse = torch.tensor(
            [[1 / k] * num_kv_heads + [1 / v] * num_kv_heads for k, v in self.scales], device=device
        ).unsqueeze(-1)

    @classmethod
    def for_model(
        cls,
        config: KVShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_scratch_pages: int = 0,
        scales: Sequence[Scales] | None = None,
        num_kv_heads: int | None = None,
    ) -> "PagedKV":
        """Creates the cache of a model with this configuration.

        Args:
            num_kv_heads: Number of KV heads of this rank, where ranks share the model; by default
                all.
        """
        return cls(
            config.num_layers,
            num_pages,
            page_size,
            num_kv_heads or config.num_kv_heads,
            config.head_dim,
            dtype,
            device,
            num_scratch_pages,
            scales,
        )

    @property
    def scratch_pages(self) -> range:
        """Page numbers of the scratch pages."""
        return range(self.num_pages, self.num_pages + self.num_scratch_pages)

    @property
    def is_8_bit(self) -> bool:
        """Whether numbers are stored as 8-bit floats."""
        return self.data.dtype.itemsize == 1

    def bytes_per_page(self) -> int:
        """Returns the bytes of one page's keys and values in all layers."""
        num_layers, heads, _, head_dim = self.data.shape
        return num_layers * heads * self.page_size * head_dim * self.data.element_size()

    def keys(self, layer: int) -> torch.Tensor:
        """Returns a view of the layer's keys, [num_kv_heads, num_slots, head_dim]."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """Returns a view of the layer's values, [num_kv_heads, num_slots, head_dim]."""
        return self._values[layer]

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Stores the keys and values of some rows.

        Args:
            slots: int64 [num_rows].
            rows: [num_rows, 2 * num_kv_heads, head_dim]; a row's keys, then its values.
        """
        dtype = self.data.dtype
        if self.is_8_bit:
            limit = torch.finfo(dtype).max
            scaled = (rows.float() * self._inverse[layer]).clamp_(-limit, limit)
            rows = scaled.to(dtype).view(torch.uint8)
        else:
            rows = rows.to(dtype)
        self._layers[layer].index_copy_(1, slots, rows.transpose(0, 1))

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies slots of all layers, as if all were read before any is written.

        Args:
            source, target: int64 [n].
        """
        self._movable.index_copy_(2, target, self._movable.index_select(2, source))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros; on a CPU in memory that the system clears page by page when it is first used,
    where clearing all of it would delay the start.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LEAST_MAPPED:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"can't allocate memory: {num_bytes} bytes") from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
