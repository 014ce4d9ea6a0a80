"""Provides the target's embedding and LM head to a draft head on a GPU.

They are the verifier's own memory where it shares them, else copies.
"""

import logging
from collections.abc import Sequence

import torch
from torch import nn

from draft_service.models.draft_head import DraftHead, SharedWeights
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.layers.embedding import Embedding, LMHead
from foredraft.models.loader import fill_tensors_randomly
from foredraft.transport.rows import ArenaError
from foredraft.transport.weights import MappedWeights

logger = logging.getLogger(__name__)


class TargetWeights:
    """Holds the target's weights that a draft head uses.

    Args:
        head: Draft head on a GPU.
        shared: Weights that the head was made with; they lie on the host until `attach`.

    Attributes:
        names: Names of the target's weights that the head uses: "embedding", "lm_head".
    """

    def __init__(self, head: DraftHead, shared: SharedWeights) -> None:
        self._device, self._dtype = head.device, head.dtype
        self._modules: dict[str, Embedding | LMHead] = {}
        if head.embedding is shared.embedding:
            self._modules["embedding"] = shared.embedding
        if head.lm_head is shared.lm_head and shared.token_map is None:
            self._modules["lm_head"] = shared.lm_head
        elif head.lm_head is shared.lm_head:
            shared.lm_head.weight = _parameter(self._copy_of(shared.lm_head.weight))
        self._on_host: dict[str, nn.Parameter] = {
            name: module.weight for name, module in self._modules.items()
        }
        self._copies: dict[str, nn.Parameter] = {}
        self._mapped: MappedWeights | None = None
        self.names = list(self._modules)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all of them on the device."""
        weights = set(self._on_host.values())
        return sum(weight.numel() * self._dtype.itemsize for weight in weights)

    def attach(self, arenas: Sequence[tensor_pb2.Arena]) -> None:
        """Gives the head its weights.

        They are the verifier's where it shares all of them in the right type, else copies.
        """
        if not self._modules or self._copies:
            return
        try:
            mapped = MappedWeights(arenas)
        except ArenaError as error:
            logger.warning("loading the target's weights again: %s", error)
            self._copy()
            return
        if all(self._fits(name, mapped.tensors.get(name)) for name in self.names):
            self._mapped = mapped
            for name, module in self._modules.items():
                module.weight = _parameter(mapped.tensors[name])
            return
        mapped.close()
        self._copy()

    def detach(self) -> None:
        """Releases the verifier's shared weights. Nothing may compute with the head any more."""
        if self._mapped is not None:
            for name, module in self._modules.items():
                module.weight = self._on_host[name]
            self._mapped.close()
            self._mapped = None

    def _fits(self, name: str, weight: torch.Tensor | None) -> bool:
        return (
            weight is not None
            and weight.shape == self._on_host[name].shape
            and weight.dtype == self._dtype
            and weight.device == self._device
        )

    def _copy(self) -> None:
        """Copies the weights to the device; the draft keeps the copies from now on."""
        copies: dict[int, nn.Parameter] = {}
        for name, module in self._modules.items():
            weight = self._on_host[name]
            if id(weight) not in copies:
                copies[id(weight)] = _parameter(self._copy_of(weight))
            self._copies[name] = module.weight = copies[id(weight)]
        logger.info("%.0f MiB of the target's weights are here twice", self.num_bytes / 2**20)

    def _copy_of(self, weight: torch.Tensor) -> torch.Tensor:
        if weight.is_meta:  # dummy weights
            made = torch.empty(weight.shape, dtype=self._dtype, device=self._device)
            fill_tensors_randomly({"weight": made})
            return made
        return weight.to(self._device)


def _parameter(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
