"""Captured graphs by kind of work, and the kinds that run without one since memory has run out."""

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from foredraft.runner.aside import ran_out

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind")
Graphs = TypeVar("Graphs")


class Shortage:
    """Says whether memory has run out in a capture, for all graphs of an executor.

    Attributes:
        is_tolerated: Whether work goes on without the graph. Not at the start, where other flags
            would help, nor with several ranks, which all capture the same.
        has_come: Whether memory has run out.
    """

    def __init__(self) -> None:
        self.is_tolerated = self.has_come = False


class GraphStore(dict[Kind, Graphs | None], Generic[Kind, Graphs]):
    """What was captured of each kind of work; None for a kind that runs operation by operation,
    since there was no memory to capture it.
    """

    def __init__(self, shortage: Shortage) -> None:
        super().__init__()
        self._shortage = shortage

    def has_graphs(self, kind: Kind) -> bool:
        """Returns whether a kind was captured; others run operation by operation."""
        return self.get(kind) is not None

    def add(self, kind: Kind, capture: Callable[[], Graphs]) -> None:
        """Captures what a kind needs, unless memory runs out."""

        def keep() -> None:
            self[kind] = capture()

        self.unless_short(kind, keep)

    def unless_short(self, kind: Kind, run: Callable[[], None]) -> None:
        """Runs a function that captures a kind; if memory runs out in it, the kind has no graphs.

        Raises:
            RuntimeError: Any other error of `run`, and this one where it is not tolerated.
        """
        shortage = self._shortage
        try:
            run()
            return
        except RuntimeError as error:
            if not shortage.is_tolerated or not ran_out(error):
                raise
            if not shortage.has_come:
                reason = str(error).strip().split("\n")[0]
                logger.warning("no memory for more CUDA graphs; steps run without: %s", reason)
        # Here nothing refers any more to the error, and so to what the capture had allocated.
        shortage.has_come = True
        self[kind] = None
        torch.cuda.empty_cache()
