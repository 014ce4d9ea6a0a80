"""Trees that a draft in another process leaves on the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from foredraft.errors import DraftError
from foredraft.transport.device_exchange import DeviceExchange
from foredraft.trees.draft_tree import NO_PARENT
from verify_service.connection.client import DraftClient
from verify_service.drafts.known import KnownSequences
from verify_service.scheduler.request import Sequence as RequestSequence


@dataclass(frozen=True, slots=True)
class RemoteTrees:
    """`DeviceTrees` of a step that was sent to a draft in another process.

    Attributes:
        client: Connection to the draft.
        epoch: Number of the attach that the step belongs to.
        known: What the draft of the attach knows of sequences.
        exchange: Memory that the draft writes its trees to.
        step: Number of the step.
        on_lost: Called with the reason if the draft is dropped.
    """

    client: DraftClient
    epoch: int
    known: KnownSequences
    exchange: DeviceExchange
    step: int
    on_lost: Callable[[DraftError], None]

    def fetch(self, trees: torch.Tensor) -> None:
        """See `DeviceTrees`. Entries beyond this draft's largest tree are set to no node."""
        self.exchange.wait_trees(self.step)
        own = self.exchange.trees[: len(trees)]
        num_nodes = own.shape[2]
        if num_nodes < trees.shape[2]:
            trees[:, 1, num_nodes:].fill_(NO_PARENT)
            trees = trees[:, :, :num_nodes]
        trees.copy_(own)

    def followed(self, sequence: RequestSequence, start: int) -> None:
        """See `DeviceTrees`."""
        self.known.followed(sequence, start)

    def is_late(self, waiting: float) -> bool:
        """See `DeviceTrees`."""
        return self.client.epoch != self.epoch or waiting > self.client.step_timeout

    def abandon(self) -> None:
        """See `DeviceTrees`."""
        self.exchange.release(self.step)
        if self.client.epoch == self.epoch:
            self.on_lost(self.client.drop("its trees did not come in time"))
