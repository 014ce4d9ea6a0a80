"""A cache for transformers that rounds keys and values, the current step's too, like a cache of
8-bit floats.
"""

from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig


class RoundingCache(DynamicCache):
    """Divides keys and values by their layer's scale, bounds and casts them, and multiplies
    again.

    Args:
        scales: Scales of each layer's keys and values.
    """

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, scales: list[tuple[float, float]]
    ) -> None:
        super().__init__(config=config)
        self._dtype, self._scales = dtype, scales

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DynamicCache."""
        limit = torch.finfo(self._dtype).max
        keys, values = (
            (rows / scale).clamp(-limit, limit).to(self._dtype).to(rows.dtype) * scale
            for rows, scale in zip((key_states, value_states), self._scales[layer_idx], strict=True)
        )
        return super().update(keys, values, layer_idx, *args, **more)
