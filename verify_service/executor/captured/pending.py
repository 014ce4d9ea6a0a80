"""A running step of captured graphs, and its result."""

import time

import numpy as np

from foredraft.trees.draft_tree import EMPTY, DraftTree, sanitize
from verify_service.executor.base import DeviceOutcome, PendingStep, StepResult
from verify_service.executor.captured.running_step import RunningStep
from verify_service.executor.choice.sampler import Outcome
from verify_service.executor.choice.verification import Verified


class GraphRun(PendingStep):
    """Stands for a replayed graph.

    Args:
        running: None where a part of the step is yet to be started.
    """

    def __init__(
        self, running: RunningStep | None, num_rows: int, outcome: DeviceOutcome, vocab_size: int
    ) -> None:
        self.num_rows, self.outcome = num_rows, outcome
        self._running, self._vocab_size = running, vocab_size
        self._started = time.perf_counter()

    @property
    def running(self) -> RunningStep:
        """The step, once all of it was started."""
        assert self._running is not None, "nothing was chosen"
        return self._running

    def choose(self) -> None:
        """Does nothing: the graph has chosen. See PendingStep."""

    @property
    def is_done(self) -> bool:
        """See PendingStep."""
        return self.running.is_done

    def finish(self) -> StepResult:
        """See PendingStep."""
        chosen = self.running.chosen()
        trees = [EMPTY] * len(chosen.lengths)
        if self.num_rows == 1:
            outcomes = [Outcome(Verified([0], tokens)) for tokens in chosen.tokens.tolist()]
        else:
            outcomes = [
                Outcome(Verified(path[:length], tokens[:length]))
                for length, path, tokens in zip(
                    chosen.lengths.tolist(),
                    chosen.paths.tolist(),
                    chosen.tokens.tolist(),
                    strict=True,
                )
            ]
            sizes = np.count_nonzero(chosen.tree_parents >= 0, axis=1).tolist()
            parents = (chosen.tree_parents[:, 1:] - 1).tolist()
            trees = [
                self._tree(tokens[:size], parents[:size])
                for size, tokens, parents in zip(
                    sizes, chosen.tree_tokens[:, 1:].tolist(), parents, strict=True
                )
            ]
        # NO_TOKEN and the padding after the last token are less than 0.
        num_tokens = np.count_nonzero(chosen.tokens >= 0, axis=1)
        broken = np.flatnonzero(num_tokens < chosen.lengths).tolist()
        num_logit_rows = len(outcomes) * self.num_rows
        seconds = time.perf_counter() - self._started
        first_rows = range(0, num_logit_rows, self.num_rows)
        output = self.running.output
        return StepResult(outcomes, output, first_rows, num_logit_rows, seconds, broken, trees)

    def _tree(self, tokens: list[int], parents: list[int]) -> DraftTree:
        tree, _ = sanitize(tokens, parents, self._vocab_size, len(tokens))
        return tree if len(tree) == len(tokens) else EMPTY
