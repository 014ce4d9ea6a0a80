"""What passes between the host and a captured decode step: records on the way in, outcomes on the way out, in pinned memory."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from foredraft.models.decoder import ModelOutput

UNDER_WAY = 3  # steps whose host memory must not be written yet: one that runs, one behind it, one being filled in


@dataclass(slots=True)
class StepArrays:
    """What the host fills in for a step, views of one pinned block.

    Attributes:
        header: int32 [B, HEADER]; columns in `triton_steps`.
        tokens: int32 [B, R]; the root first.
        parents: int32 [B, R], parent rows; see `triton_sampling`.
    """

    header: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the rule gave, on the host; views that stay as they are for two more steps.

    Attributes:
        lengths: int32 [B], accepted rows.
        paths: int32 [B, R], these rows, the root first; -1 after.
        tokens: int32 [B, R], the token emitted at each; -1 after.
        tree_tokens, tree_parents: int32 [B, R], the trees that were verified, the root first; as in `StepArrays`.
    """

    lengths: npt.NDArray[np.int32]
    paths: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    tree_tokens: npt.NDArray[np.int32]
    tree_parents: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-probabilities by the raw logits, for all rows of a step; views that stay as they are for two more steps.

    Attributes:
        values: float32 [rows, 1 + n], of the chosen token, then of the best ones.
        best: int32 [rows, n], these.
    """

    values: npt.NDArray[np.float32]
    best: npt.NDArray[np.int32]


class RunningStep:
    """A step that was started.

    Attributes:
        logprobs: To be read once it is done; None where nobody asked.
        output: Hidden states of all B x R rows, padding included, once it is done and until the next step starts (the logits
            are gone).
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
        """Waits for the outcome."""
        self._done.synchronize()
        results = self._results.numpy()
        max_rows = (results.shape[1] - 1) // 4
        parts = (results[:, 1 + i * max_rows :][:, : self._num_rows] for i in range(4))
        return Chosen(results[:, 0], *parts)


def pinned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Zeros that a GPU can read and write while the host goes on."""
    return torch.zeros(*shape, dtype=dtype).pin_memory()
