"""Exchanges steps that stay on a GPU through an arena: committed tokens to the draft, trees back.

Two words of the arena order the streams of both processes: the number of the newest step whose
committed tokens are written, and of the newest step whose trees are. Each side writes its own word
after its work and makes its stream wait for the other's.
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
    """Sizes of a step in the exchange.

    Attributes:
        max_batch: Maximum number of sequences.
        num_tokens: Maximum number of committed tokens of a sequence, R.
        num_nodes: Number of nodes of a tree without the root, N.
    """

    max_batch: int
    num_tokens: int
    num_nodes: int

    def tensors(self, row: RowFormat | None) -> list[TensorSpec]:
        """Returns the tensors of the arena; where the draft reads rows, they lie directly behind
        the ring.

        An additional row serves the padding of batches.
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
    """The verifier's end of the exchange, for the life of an attach.

    Its tensors are valid only while a reference to it is held.

    Args:
        tensors: Tensors of the arena by name.
        verified: Address of the word that the verifier writes.
        drafted: Address of the word that the draft writes.

    Attributes:
        accepted: int32 [max_batch, 1 + R], number of committed tokens, then the tokens.
        rows: [max_batch, R, width], hidden states of the accepted rows; None for a draft that reads
            none.
        trees: int32 [max_batch, 2, N], tokens, then parents; a parent of -2 marks an absent node.
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
        """Makes the current stream mark the commit of a step as written."""
        cuda.write_word(self._current.cuda_stream, self._verified, step)

    def wait_trees(self, step: int) -> None:
        """Makes the current stream wait for the trees of a step, unless the draft is gone."""
        with self._lock:
            if not self._is_closed:
                self._newest = step
                cuda.wait_word(self._current.cuda_stream, self._drafted, step)

    def release(self, step: int) -> None:
        """Ends the wait for a step's trees, which are meaningless then. Any thread may call it.

        A draft that still runs may write the number of an earlier step over it, so call this
        again while the stream has not come to its wait.
        """
        cuda.write_word(self._side.cuda_stream, self._drafted, step)

    def close(self) -> None:
        """Ends every wait of the attach; nothing is waited for any more.

        From any thread.
        """
        with self._lock:
            self._is_closed = True
            self.release(self._newest)

    @property
    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.accepted.device)


class DraftExchange(ABC):
    """The draft's end of the exchange.

    Attributes:
        accepted: int32 [max_batch + 1, 1 + R]; the last row belongs to no sequence.
        trees: int32 [max_batch + 1, 2, N]; the last row belongs to no sequence.
        drafted: int32 [1], number of the newest step whose trees are written.
        hidden: [n, width], the ring and the rows behind it; None for a draft that reads none.
        first_row: Index of the first row behind the ring in `hidden`.
    """

    accepted: torch.Tensor
    trees: torch.Tensor
    drafted: torch.Tensor
    hidden: torch.Tensor | None
    first_row: int

    @abstractmethod
    def wait(self, step: int) -> None:
        """Makes the current stream wait for the commit of an announced step."""

    @abstractmethod
    def publish(self, step: int) -> None:
        """Makes the current stream mark a step's trees as written."""

    @abstractmethod
    def abandon(self) -> None:
        """Ends all waits for data that will not come. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Gives the memory back once nothing uses it. May be called twice."""
