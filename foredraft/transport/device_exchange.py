"""Steps that stay on a GPU: what was committed goes to the draft, and trees come back, through an arena there.

Two words of the arena order the streams of both processes: the newest step whose committed tokens are there, and the newest
step whose trees are. Each side writes its own after its work and lets its stream wait for the other's.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from foredraft.transport import cuda
from foredraft.transport.layout import TensorSpec
from foredraft.transport.rows import RowFormat

ACCEPTED, ROWS, TREES = "accepted", "rows", "trees"  # names among the arena's tensors


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a step.

    Attributes:
        max_batch: Sequences at most.
        num_tokens: Committed tokens of a sequence at most, R.
        num_nodes: Of a tree, the root not counted, N.
    """

    max_batch: int
    num_tokens: int
    num_nodes: int

    def tensors(self, row: RowFormat | None) -> list[TensorSpec]:
        """What passes through the arena, rows directly behind the ring where the draft reads them.

        One row more than sequences takes what padding of a batch reads and writes.
        """
        batch = self.max_batch + 1
        specs = [
            TensorSpec(ACCEPTED, torch.int32, (batch, 1 + self.num_tokens)),
            TensorSpec(TREES, torch.int32, (batch, 2, self.num_nodes)),
        ]
        if row is not None:
            shape = (self.max_batch, self.num_tokens, row.width)
            specs.insert(0, TensorSpec(ROWS, row.dtype, shape, follows=True))
        return specs


class DeviceExchange:
    """The verifier's end, for the life of an attach. Whoever uses its tensors holds it: they are memory while it is held.

    Args:
        tensors: Of the arena, by name.
        verified: Address of the word that the verifier writes.
        drafted: Address of the word that the draft writes.

    Attributes:
        accepted: int32 [max_batch, 1 + R], how many tokens were committed, then these.
        rows: [max_batch, R, width], hidden states of the accepted rows; None for a draft that reads none.
        trees: int32 [max_batch, 2, N], tokens, then parents; -2 for the parent of a node that is none.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], verified: int, drafted: int) -> None:
        self.accepted = tensors[ACCEPTED][:-1]
        self.rows = tensors.get(ROWS)
        self.trees = tensors[TREES][:-1]
        self._verified, self._drafted = verified, drafted
        self._side = cuda.side_stream(self.accepted.device)
        self._lock = threading.Lock()
        self._newest = 0  # step that was waited for
        self._is_closed = False

    def publish(self, step: int) -> None:
        """The current stream says that what a step committed is there."""
        cuda.write_word(self._current, self._verified, step)

    def wait_trees(self, step: int) -> None:
        """The current stream waits for the trees of a step; not for those of a draft that is gone."""
        with self._lock:
            if not self._is_closed:
                self._newest = step
                cuda.wait_word(self._current, self._drafted, step)

    def release(self, step: int) -> None:
        """Ends the wait for a step's trees, which mean nothing then. From any thread.

        A draft that goes on may yet write the number of a step before: where the stream has not come to its wait, say it
        again.
        """
        cuda.write_word(self._side, self._drafted, step)

    def close(self) -> None:
        """The attach is over: ends every wait, and nothing is waited for any more. From any thread."""
        with self._lock:
            self._is_closed = True
            self.release(self._newest)

    @property
    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.accepted.device)


class DraftExchange(ABC):
    """The draft's end.

    Attributes:
        accepted: int32 [max_batch + 1, 1 + R]; the last row is nobody's.
        trees: int32 [max_batch + 1, 2, N]; likewise.
        hidden: [n, width], the ring and the rows behind it; None for a draft that reads none.
        first_row: Of them, the first behind the ring.
    """

    accepted: torch.Tensor
    trees: torch.Tensor
    hidden: torch.Tensor | None
    first_row: int

    @abstractmethod
    def wait(self, step: int) -> None:
        """The current stream waits for what an announced step committed."""

    @abstractmethod
    def publish(self, step: int) -> None:
        """The current stream says that a step's trees are there."""

    @abstractmethod
    def abandon(self) -> None:
        """Ends all waits for what will not come. From any thread."""

    @abstractmethod
    def close(self) -> None:
        """Gives the memory back once nothing uses it. May be called twice."""
