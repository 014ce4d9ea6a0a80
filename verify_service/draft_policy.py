"""How much to draft for a sequence, from what its drafts brought and from what a wider forward costs."""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

OBSERVED_WEIGHT = 0.1  # of one real step in the cost of its width
LEAST_WEIGHT = (
    0.1  # of the newest outcome in a node's acceptance estimate; more while there are few
)
FIRST_PAUSE = 4  # decode steps without drafting after drafting stopped paying
LONGEST_PAUSE = 32
PROBE_NODES = 2  # drafted after a pause, until one is accepted
PRIOR_DECAY = 0.9  # of the acceptance assumed for a node over the one before it
PRIOR_WEIGHT = 0.02  # of one outcome in the acceptance assumed for sequences to come
# Acceptance of a first node before anything was seen, by confidence of the proposal.
PRIORS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.85)


class StepCost:
    """Seconds of one target forward by number of rows, measured at start and corrected by real steps.

    Between measured widths the cost is interpolated; beyond the last it grows linearly. A wider forward never
    counts as cheaper than a narrower one: where the measurements say so, both take their mean.
    """

    def __init__(self, widths: Sequence[int], seconds: Sequence[float]) -> None:
        self._widths = list(widths)
        self._measured = list(seconds)
        self._seconds = rising(self._measured)

    @classmethod
    def measure(
        cls, widths: Sequence[int], run: Callable[[int], float], budget: float = 2.0
    ) -> "StepCost":
        """Calls `run(width)` -> seconds in rounds over all widths and keeps the best of each width.

        After a first round, which warms up, rounds go on for `budget` seconds, five at most.
        """
        for width in widths:
            run(width)
        best = [run(width) for width in widths]
        spent = sum(best)
        for _ in range(4):
            if spent > budget:
                break
            times = [run(width) for width in widths]
            best = [min(pair) for pair in zip(best, times, strict=True)]
            spent += sum(times)
        return cls(widths, best)

    def observe(self, rows: int, seconds: float) -> None:
        """Takes the time of a real forward of decoding rows into the nearest measured width."""
        i = min(range(len(self._widths)), key=lambda i: abs(self._widths[i] - rows))
        width = self._widths[i]
        if abs(width - rows) * 4 > width:
            return  # too far from any to say much about it
        seconds *= self.seconds(width) / self.seconds(rows)
        self._measured[i] += OBSERVED_WEIGHT * (seconds - self._measured[i])
        self._seconds = rising(self._measured)

    def seconds(self, rows: int) -> float:
        """Expected seconds of a forward with `rows` rows."""
        widths, seconds = self._widths, self._seconds
        if rows <= widths[0] or len(widths) == 1:
            return seconds[0]
        i = min(bisect.bisect_left(widths, rows), len(widths) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (widths[i] - widths[i - 1])
        return seconds[i - 1] + slope * (rows - widths[i - 1])

    def table(self) -> dict[int, float]:
        """Widths and seconds, for logs and benchmarks."""
        return dict(zip(self._widths, self._seconds, strict=True))


def rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in least squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        block = (value, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, count = blocks.pop()
            total = count + block[1]
            block = ((mean * count + block[0] * block[1]) / total, total)
        blocks.append(block)
    return [mean for mean, count in blocks for _ in range(count)]


@dataclass(slots=True)
class DraftHistory:
    """What drafting brought to one sequence.

    Attributes:
        hits: Estimated probability that the i-th proposed node is accepted.
        num_outcomes: How often the i-th node was verified.
        pause: Decode steps still to pass without drafting.
        next_pause: Length of the next pause.
        is_probing: After a pause, until a draft was right again.
    """

    hits: list[float] = field(default_factory=list)
    num_outcomes: list[int] = field(default_factory=list)
    pause: int = 0
    next_pause: int = FIRST_PAUSE
    is_probing: bool = False


class DraftPolicy:
    """Chooses the number of tree nodes that maximises accepted tokens minus the worth of the time they cost.

    A node is worth verifying when its acceptance probability exceeds the tokens that the batch would make
    plainly in the extra time. Drafts propose nodes roughly best first, so the choice is a prefix of the tree.
    Which token is chosen never depends on it (design section 2), so it may use any measurement.

    A sequence of which nothing is known yet is assumed to be like those before it.

    Args:
        cost: Forward seconds by rows; None always drafts the maximum.
    """

    def __init__(self, cost: StepCost | None) -> None:
        self._cost = cost
        self._priors = list(PRIORS)

    def observe(self, rows: int, seconds: float) -> None:
        """Takes the time of a forward that only decoded."""
        if self._cost is not None:
            self._cost.observe(rows, seconds)

    def num_nodes(
        self, history: DraftHistory, max_nodes: int, num_running: int, confidence: int = 0
    ) -> int:
        """Nodes that are worth verifying in the coming step, at most `max_nodes`."""
        num_running = max(num_running, 1)
        if self._cost is None or max_nodes == 0:
            return max_nodes
        if history.pause > 0:
            history.pause -= 1
            return 0
        if history.is_probing:
            return min(PROBE_NODES, max_nodes)
        base = self._cost.seconds(num_running)
        plain_rate = num_running / base
        gain, best, best_value = 0.0, 0, 0.0
        for nodes in range(1, max_nodes + 1):
            gain += self._hit(history, nodes - 1, confidence)
            value = gain - plain_rate * (self._cost.seconds(num_running + nodes) - base)
            if value > best_value:
                best, best_value = nodes, value
        if best == 0:
            self._pause(history)
        return best

    def record(
        self, history: DraftHistory, num_nodes: int, accepted: Sequence[int], confidence: int = 0
    ) -> None:
        """Takes the outcome of one verified tree.

        Args:
            num_nodes: Nodes that were verified; nothing is learnt from none.
            accepted: Indices of those that were accepted.
        """
        if num_nodes == 0:
            return
        level = min(confidence, len(PRIORS) - 1)
        self._priors[level] += PRIOR_WEIGHT * ((0 in accepted) - self._priors[level])
        if history.is_probing:
            if accepted:
                # Text has begun to repeat: what was learnt before it did says nothing any more.
                history.hits, history.num_outcomes = [], []
                history.is_probing, history.next_pause = False, FIRST_PAUSE
            else:
                self._pause(history)
            return
        taken = set(accepted)
        for i in range(num_nodes):
            if i == len(history.hits):
                history.hits.append(self._hit(history, i, confidence))
                history.num_outcomes.append(0)
            history.num_outcomes[i] += 1
            weight = max(LEAST_WEIGHT, 1 / (history.num_outcomes[i] + 1))
            history.hits[i] += weight * ((i in taken) - history.hits[i])

    def _pause(self, history: DraftHistory) -> None:
        history.pause = history.next_pause
        history.next_pause = min(2 * history.next_pause, LONGEST_PAUSE)
        history.is_probing = True

    def _hit(self, history: DraftHistory, index: int, confidence: int) -> float:
        if index < len(history.hits):
            return history.hits[index]
        return self._priors[min(confidence, len(PRIORS) - 1)] * PRIOR_DECAY**index
