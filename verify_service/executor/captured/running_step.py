"""A started step's outcome on the host: `RunningStep`, and what it holds."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from foredraft.models.decoder import ModelOutput

# Number of host buffers: for a step that runs, one behind it, and one being filled in.
UNDER_WAY = 3


@dataclass(frozen=True, slots=True)
class Chosen:
    """Holds a step's outcome on the host; the views stay valid for two more steps.

    Attributes:
        lengths: int32 [B], number of accepted rows.
        paths: int32 [B, R], accepted rows from the root on; -1 after the last.
        tokens: int32 [B, R], the token emitted at each accepted row; -1 after the last.
        tree_tokens, tree_parents: int32 [B, R], the verified trees, root first, in the format of
            the records.
    """

    lengths: npt.NDArray[np.int32]
    paths: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    tree_tokens: npt.NDArray[np.int32]
    tree_parents: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Holds log-probabilities from the raw logits, for all rows of a step; the views stay valid for
    two more steps.

    Attributes:
        values: float32 [rows, 1 + n], of the chosen token, then of the best ones.
        best: int32 [rows, n], these.
    """

    values: npt.NDArray[np.float32]
    best: npt.NDArray[np.int32]


class RunningStep:
    """Stands for a step that was started.

    Attributes:
        logprobs: Log-probabilities, valid once the step is complete; None where no request asks for
            them.
        output: Hidden states of all B x R rows, padding included, valid from the end of the step to
            the start of the next (the logits are gone).
    """

    def __init__(
        self,
        output: ModelOutput,
        results: torch.Tensor,
        done: torch.cuda.Event,
        num_rows: int,
        logprobs: LogProbs | None = None,
    ) -> None:
        self.output, self.logprobs = output, logprobs
        self._results, self._done, self._num_rows = results, done, num_rows

    @property
    def is_done(self) -> bool:
        """Whether the outcome is on the host."""
        return self._done.query()

    def chosen(self) -> Chosen:
        """Waits for the outcome and returns it."""
        self._done.synchronize()
        results = self._results.numpy()
        max_rows = (results.shape[1] - 1) // 4
        parts = (results[:, 1 + i * max_rows :][:, : self._num_rows] for i in range(4))
        return Chosen(results[:, 0], *parts)


def pinned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Allocates zeros that a GPU can read and write while the host continues."""
    return torch.zeros(*shape, dtype=dtype).pin_memory()
