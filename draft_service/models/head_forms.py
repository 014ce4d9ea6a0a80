"""Selects the form in which a draft head keeps each of its matrices."""

from collections.abc import Iterable, Mapping

import torch

from foredraft.errors import CheckpointError
from foredraft.layers.linear import LinearMethod, MethodChoice
from foredraft.models.quantization_config import Quantization


class HeadForms:
    """Gives quantised matrices the method that reads them, all others the plain one.

    Which are quantised, the checkpoint's tensors say: tools that quantise decoder layers alone
    leave a head's other matrices plain without naming them in config.json. A GPU keeps the weights
    that quantised matrices stand for, since captured steps of drafts are proven with plain ones.

    Args:
        quantization: Format of the quantised matrices; None for none.
        layout: Shapes of the checkpoint's tensors by our names; empty where weights are made up,
            and config.json alone decides.
        device: Device of the weights.
    """

    def __init__(
        self,
        quantization: Quantization | None,
        layout: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self._quantization = quantization
        self._layout = layout
        self._device = device

    def of(self, prefix: str) -> MethodChoice:
        """Returns the choice for matrices whose names begin with `prefix`."""

        def choose(names: Iterable[str]) -> LinearMethod | None:
            full = [prefix + name for name in names]
            plain = [name for name in full if not self._is_quantized(name)]
            if self._quantization is None or len(plain) == len(full):
                return None
            if plain:
                raise CheckpointError(
                    f"{', '.join(plain)} is plain and the rest of {', '.join(full)} quantised; they"
                    " are computed together: mixed schemes are not supported"
                )
            from foredraft.layers.quantized import ExpandedMethod, StoredMethod

            method = StoredMethod if self._device.type == "cpu" else ExpandedMethod
            return method(self._quantization.scheme)

        return choose

    def _is_quantized(self, name: str) -> bool:
        if self._quantization is None:
            return False
        if not self._layout:
            return not self._quantization.skips(name)
        return f"{name}.{self._quantization.scheme.scale_name}" in self._layout
