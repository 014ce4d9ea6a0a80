"""How much to draft for a sequence, from what its drafts brought and from what a wider forward costs."""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LEVEL_WEIGHT, OWN_WEIGHT = 0.2, 0.25  # of one real step in the cost of all widths, and of its own
LEAST_WEIGHT = (
    0.1  # of the newest outcome in a node's acceptance estimate; more while there are few
)
FIRST_PAUSE = 4  # decode steps without drafting after drafting stopped paying
LONGEST_PAUSE = 32
PROBE_SHARE = 0.025  # of all time that trying again may take where drafts are expensive
PROBE_NODES = 2  # drafted after a pause, until one is accepted
OVERHEAD_LEVELS = 2.0  # that a draft costs beside its levels
PRIOR_DECAY = 0.9  # of the acceptance assumed for a node over its parent's
SIBLING_DECAY = 0.3  # over that of the sibling before it
PRIOR_WEIGHT = 0.05  # of one outcome in the acceptance assumed for sequences to come
# Acceptance of a first node before anything was seen, by confidence of the proposal; 0 is a model's.
PRIORS = (0.6, 0.3, 0.45, 0.6, 0.75, 0.85)


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
        """Takes the time of a real forward of decoding rows.

        All widths move towards it in proportion, since a machine that has become slower or faster has become so for
        all of them; the nearest width moves a little more, which slowly corrects the table's shape.
        """
        # An outlier, such as a step that waited for a page fault, must not throw the table.
        surprise = min(seconds / self.seconds(rows) - 1, 1.0)
        nearest = min(range(len(self._widths)), key=lambda i: abs(math.log(self._widths[i] / rows)))
        for i in range(len(self._measured)):
            self._measured[i] *= 1 + (OWN_WEIGHT if i == nearest else LEVEL_WEIGHT) * surprise
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


class DraftCost:
    """How long a step waits for its drafts, by the levels drafted: learnt from real steps, nothing before the first.

    In units of a plain step of one sequence, since a machine that becomes slower does so for both. Of levels that were
    not seen yet the wait is taken from the nearest that were; reading what was committed and the message there and back
    count as `OVERHEAD_LEVELS`.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}

    def observe(self, levels: int, steps: float) -> None:
        """Takes the wait of a real step."""
        known = self._steps.setdefault(levels, steps)
        # Whatever else runs lengthens a wait, nothing shortens it: a short one says more.
        weight = 0.1 if steps > known else 0.3
        self._steps[levels] = known + weight * (min(steps, 2 * known) - known)

    def steps(self, levels: int) -> float:
        """Expected wait; 0 while nothing is known."""
        if not self._steps or levels == 0:
            return 0.0
        nearest = min(self._steps, key=lambda seen: abs(seen - levels))
        return self._steps[nearest] * (levels + OVERHEAD_LEVELS) / (nearest + OVERHEAD_LEVELS)


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
        self._draft_cost = DraftCost()
        self._priors = list(PRIORS)

    def observe(self, rows: int, seconds: float) -> None:
        """Takes the time of a step of the target that only decoded."""
        if self._cost is not None:
            self._cost.observe(rows, seconds)

    def observe_draft(self, levels: int, seconds: float) -> None:
        """Takes the time that a step waited for the trees of a draft model, the deepest of `levels`."""
        if self._cost is not None:
            self._draft_cost.observe(levels, seconds / self._cost.seconds(1))

    def num_nodes(
        self,
        history: DraftHistory,
        max_nodes: int,
        num_running: int,
        confidence: int = 0,
        parents: Sequence[int] = (),
        depth: int = 0,
    ) -> int:
        """Nodes that are worth drafting and verifying in the coming step, at most `max_nodes`.

        Args:
            parents: Of the nodes, where they are known; a chain is assumed of others.
            depth: Levels of the tree that would have to be drafted; 0 for one that is there already, or costs nothing.
        """
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
        hits = self._hits(history, max_nodes, confidence, parents)
        for nodes in range(1, max_nodes + 1):
            gain += hits[nodes - 1]
            extra = self._cost.seconds(num_running + nodes) - base
            # All sequences of the batch share the wait.
            waiting = self._draft_cost.steps(min(nodes, depth)) * self._cost.seconds(1)
            extra += waiting / num_running
            value = gain - plain_rate * extra
            if value > best_value:
                best, best_value = nodes, value
        if best == 0:
            self._pause(history)
        elif depth:
            history.next_pause = FIRST_PAUSE
        return best

    def record(
        self,
        history: DraftHistory,
        parents: Sequence[int],
        accepted: Sequence[int],
        confidence: int = 0,
    ) -> None:
        """Takes the outcome of one verified tree.

        Args:
            parents: Of the nodes that were verified; nothing is learnt from none.
            accepted: Indices of those that were accepted.
        """
        if not parents:
            return
        hits = self._hits(history, len(parents), confidence, parents)
        level = min(confidence, len(PRIORS) - 1)
        self._priors[level] += PRIOR_WEIGHT * ((0 in accepted) - self._priors[level])
        if history.is_probing and confidence == 0:
            # A model's first guess is right often enough: that it was says nothing about deeper ones.
            history.is_probing = False
        elif history.is_probing:
            if accepted:
                # Text has begun to repeat: what was learnt before it did says nothing any more.
                history.hits, history.num_outcomes = [], []
                history.is_probing, history.next_pause = False, FIRST_PAUSE
            else:
                self._pause(history)
            return
        new = len(parents) - len(history.num_outcomes)
        history.num_outcomes.extend([0] * new)
        for i, hit in enumerate(hits):
            history.num_outcomes[i] += 1
            weight = max(LEAST_WEIGHT, 1 / (history.num_outcomes[i] + 1))
            hits[i] = hit + weight * ((i in accepted) - hit)
        history.hits[: len(hits)] = hits

    def _pause(self, history: DraftHistory) -> None:
        history.pause = history.next_pause
        longest = max(LONGEST_PAUSE, int(self._draft_cost.steps(PROBE_NODES) / PROBE_SHARE))
        history.next_pause = min(2 * history.next_pause, longest)
        history.is_probing = True

    def _hits(
        self, history: DraftHistory, count: int, confidence: int, parents: Sequence[int]
    ) -> list[float]:
        """Estimated acceptance of the first `count` nodes."""
        first = self._priors[min(confidence, len(PRIORS) - 1)]
        known = len(history.hits)
        hits: list[float] = []
        next_sibling: dict[int, float] = {}
        for i in range(count):
            parent = parents[i] if i < len(parents) else i - 1
            above = first
            if parent >= 0:
                # What repeats goes on repeating. A model's guesses are about as good at each depth.
                above = (PRIOR_DECAY if confidence else hits[0]) * hits[parent]
            assumed = next_sibling.get(parent, above)
            next_sibling[parent] = SIBLING_DECAY * assumed
            hits.append(history.hits[i] if i < known else assumed)
        return hits
