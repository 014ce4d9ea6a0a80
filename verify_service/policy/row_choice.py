"""Which nodes of which trees to draft where every row costs: the likeliest first, for as long as they bring more than they take."""

from collections.abc import Sequence

from verify_service.policy.acceptance import Acceptance, DraftHistory
from verify_service.policy.messages import Want
from verify_service.policy.step_time import DraftTimes, RowTimes

# Seconds that a single step may lose, for each sequence and in all.
AT_RISK, MOST_AT_RISK = 0.065, 0.15
EVALUATIONS = 32  # sums of rows at most that are compared for one depth
CLOSE = 32  # tokens that a draft reads on the side
READ_STEPS = 0.015  # of a plain step of one sequence that it takes for each of more tokens
OUTLOOK = 256  # tokens at most that a sequence is expected to go on for

Item = tuple[float, int, int]
"""Gain per node, sequence, rung."""


class RowChoice:
    """Compares sets of nodes by tokens per second.

    Args:
        max_nodes: Of a tree.
        depth: Levels of the largest tree.
    """

    def __init__(
        self, acceptance: Acceptance, draft_times: DraftTimes, max_nodes: int, depth: int
    ) -> None:
        self._acceptance = acceptance
        self._draft_times = draft_times
        self._max_nodes = max_nodes
        self._depth = depth

    def items(self, trees: Sequence[tuple[DraftHistory, int, int]], now: float) -> list[Item]:
        """All rungs that the trees (history, nodes, confidence) have, best first."""
        ladder = self._acceptance.ladder
        items = []
        for i, (history, num_nodes, confidence) in enumerate(trees):
            if num_nodes == 0:
                continue
            gains = self._acceptance.gains(history, confidence, now)
            rungs = range(ladder.num_within(num_nodes))
            items += [(gains[rung] / ladder.widths[rung], i, rung) for rung in rungs]
        # Stable: of one sequence, rungs stay in order.
        items.sort(key=lambda item: -item[0])
        return items

    def best(
        self,
        times: RowTimes,
        batch: int,
        other_rows: int,
        items: Sequence[Item],
        levels: int,
        is_free: bool = False,
    ) -> tuple[float, list[int]]:
        """The best tokens per second with trees of at most `levels` levels, and the nodes of each sequence.

        Args:
            other_rows: Of prompts. What they take is no matter of the choice, else in a long step every node would pay.
            is_free: The trees are there already.
        """
        ladder = self._acceptance.ladder
        largest = levels if levels < self._depth else self._max_nodes
        if largest < self._max_nodes:
            items = [item for item in items if ladder.sizes[item[2]] <= largest]
        stride = 1 + len(items) // EVALUATIONS
        gain, rows, drafted, wait = float(batch), batch + other_rows, 0, 0.0
        unit = times.seconds(1, 1)
        plain = times.seconds(batch, batch)
        others = times.seconds(batch, rows) - plain
        longest = plain + min(batch * AT_RISK, MOST_AT_RISK)
        best_rate, best_count = 0.0, 0
        for count, (density, _, rung) in enumerate(items, 1):
            width = ladder.widths[rung]
            gain += density * width
            rows += width
            drafted += rung == 0
            if count % stride == 0 or count == len(items):
                if not is_free:
                    wait = self._draft_times.steps(drafted, levels) * unit
                seconds = times.seconds(batch, rows) - others + wait
                rate = gain / seconds
                if rate > best_rate and seconds < longest:
                    best_rate, best_count = rate, count
        nodes = [0] * batch
        for _, i, rung in items[:best_count]:
            nodes[i] = ladder.sizes[rung]
        return best_rate, nodes

    def pays_to_read(self, times: RowTimes, want: Want, batch: int, now: float) -> bool:
        """Whether a sequence goes on long enough for what its draft has to read first."""
        if want.behind <= CLOSE or not want.limit:
            return True
        ladder, unit = self._acceptance.ladder, times.seconds(1, 1)
        seconds = times.seconds(batch, batch)
        rate = batch / seconds
        row = rate * (times.seconds(batch, batch + 1) - seconds)  # in tokens of plain decoding
        gains = self._acceptance.gains(want.history, 0, now)
        num_rungs = ladder.num_within(want.limit)
        brought = sum(
            max(gain - width * row, 0.0)
            for gain, width in zip(gains[:num_rungs], ladder.widths[:num_rungs], strict=True)
        )
        brought -= rate * self._draft_times.steps(batch, 1) * unit / batch
        steps = min(want.left, OUTLOOK) / (1 + max(brought, 0.0))
        return steps * brought > rate * want.behind * READ_STEPS * unit
