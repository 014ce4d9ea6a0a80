"""What a step costs: the target's forward from a table measured at start, and what is waited for drafts, learnt.

A machine that becomes slower does so for steps of all kinds, and changes no choice between them: only what one kind takes longer than
the others, beyond the table, is learnt.
"""

import math
import statistics
from collections import deque

from verify_service.controller.acceptance import Array
from verify_service.controller.config import DEFAULT, ControllerConfig
from verify_service.controller.tables import Table

PLAIN, VERIFY = 0, 1
MOST_MORE = 2.0  # factor by which steps with drafts may be slower than the table says, or faster
AFTER_CHANGE = (
    8  # steps after a change from one kind to the other that are compared with those before it
)
SOONER, SOONER_WEIGHT = 0.7, 0.4
OVERHEAD_LEVELS = 2.0  # levels that an answer of a draft costs beside its own
FEWER = 0.7  # what half the sequences take, where only more are known


class CostModel:
    """Seconds of steps, as the table would have them: a slowdown of all kinds is left out.

    Args:
        table: Seconds of the target's part.
        per_token: Seconds that a token of context adds to a step, by the bytes of its KV.
    """

    def __init__(
        self, table: Table, per_token: float = 0.0, config: ControllerConfig = DEFAULT
    ) -> None:
        self.table = table
        self.context = 0
        self._config = config
        self._slope = _Slope(per_token)
        self._level = 0.0  # logarithm of how much slower all kinds are than the table, lately
        self._more = 0.0  # the same of steps with drafts beyond those without
        self._offs: list[float | None] = [None, None]  # of the newest steps of each kind
        self._log: deque[float] = deque(maxlen=config.relative_memory)
        self._kind, self._num_alike = PLAIN, 0
        self._drafts: dict[tuple[int, bool], dict[tuple[int, int], tuple[float, float]]] = {}

    def plain(self, batch: int) -> float:
        """Seconds of a step without drafts."""
        return self.target(batch, self.table.plain_rows(batch))

    def target(self, batch: int, rows: int) -> float:
        """Seconds of the target's part of a step."""
        kind = self._kind_of(batch, rows)
        return math.exp(self._more * kind) * self._bare(batch, rows)

    def targets(self, batch: int, rows: Array) -> Array:
        """The same for several numbers of rows, all with drafts."""
        bare = self.table.many(batch, rows) + self._slope.value * self.context
        found: Array = math.exp(self._more) * bare
        return found

    def draft(self, draft: int, sequences: int, levels: int, is_ahead: bool = False) -> float:
        """Seconds that a step waits for a draft.

        Args:
            is_ahead: The step is started behind another one, and the draft follows on the device.
        """
        if not levels or not sequences:
            return 0.0
        known = self._drafts.get((draft, is_ahead))
        if not known:
            share = self._config.prior_draft * (levels + OVERHEAD_LEVELS)
            return share * self.table.unit
        size = _size(sequences)
        if (size, levels) in known:
            return _surely(*known[size, levels], is_ahead)
        nearest = min(known, key=lambda key: 2 * abs(key[0] - size) + abs(key[1] - levels))
        share = (levels + OVERHEAD_LEVELS) / (nearest[1] + OVERHEAD_LEVELS)
        return _surely(*known[nearest], is_ahead) * share * FEWER ** max(nearest[0] - size, 0)

    def is_draft_known(self, draft: int, is_ahead: bool = False) -> bool:
        """Whether the draft was waited for before."""
        return (draft, is_ahead) in self._drafts

    @property
    def is_compared(self) -> bool:
        """Whether steps with drafts were compared with plain ones often enough."""
        return len(self._log) == self._log.maxlen

    def observe(self, batch: int, rows: int, seconds: float, is_clean: bool = True) -> None:
        """Takes the target's part of a real step.

        Args:
            is_clean: Nothing else was done meanwhile.
        """
        kind = self._kind_of(batch, rows)
        if kind != self._kind:
            self._kind, self._num_alike = kind, 0
        self._num_alike += 1
        if not is_clean:
            return
        bare = self._bare(batch, rows)
        self._slope.add((batch, rows), self.context, seconds - bare, self.table.unit)
        off = math.log(max(seconds / bare, 1e-3))
        before = self._offs[1 - kind]
        if self._num_alike <= AFTER_CHANGE and before is not None:
            self._log.append(off - before if kind == VERIFY else before - off)
            share = len(self._log) / (len(self._log) + self._config.relative_memory / 4)
            more = share * statistics.median(self._log)
            self._more = max(min(more, math.log(MOST_MORE)), -math.log(MOST_MORE))
        own = self._offs[kind]
        is_first = own is None or self._num_alike == 1
        self._offs[kind] = off if own is None or is_first else own + (off - own) / 4
        surprise = max(min(off - self._more * kind - self._level, 0.5), -0.5)
        self._level += surprise / 8

    def waited(
        self, draft: int, sequences: int, levels: int, seconds: float, is_ahead: bool = False
    ) -> None:
        """Takes what a real step waited for a draft."""
        known = self._drafts.setdefault((draft, is_ahead), {})
        key = _size(sequences), levels
        seconds = max(seconds, 0.0) / math.exp(self._level)
        before = self.draft(draft, sequences, levels, is_ahead)
        before, count = known.get(key, (before, 0.0))
        count = min(count + 1.0, 10.0)
        seconds = min(seconds, 2 * before + 0.1 * self.table.unit)  # the first also reads prompts
        # What it had to read first made it slow; an answer that came much sooner shows what is usual.
        weight = max(1 / count, SOONER_WEIGHT if seconds < SOONER * before else 0.0)
        known[key] = before + weight * (seconds - before), count

    def waited_within(self, draft: int, batch: int, levels: int, rows: int, seconds: float) -> None:
        """The same of a step that contains it: what is beyond the target's own time."""
        target = self.target(batch, rows) * math.exp(self._level)
        self.waited(draft, batch, levels, seconds - target, is_ahead=True)

    def forget_drafts(self, share: float) -> None:
        """What is known of drafts' time grows old while nothing is drafted: what seems to take too long is tried again."""
        for known in self._drafts.values():
            for key, (seconds, count) in known.items():
                known[key] = seconds, count * (1 - share)

    def _kind_of(self, batch: int, rows: int) -> int:
        return VERIFY if rows > self.table.plain_rows(batch) else PLAIN

    def _bare(self, batch: int, rows: int) -> float:
        return self.table.seconds(batch, rows) + self._slope.value * self.context


class _Slope:
    """Seconds of a token of context: least squares within steps of one shape, with the value known beforehand as prior."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._prior = value
        self._means: dict[tuple[int, int], tuple[float, float]] = {}
        self._products = self._squares = 0.0

    def add(self, shape: tuple[int, int], context: int, beyond: float, unit: float) -> None:
        """Takes a step that took so much longer than the model says."""
        seconds = max(min(beyond, unit), -unit) + self.value * context
        mean_context, mean_seconds = self._means.get(shape, (float(context), seconds))
        off, more = context - mean_context, seconds - mean_seconds
        self._means[shape] = mean_context + off / 64, mean_seconds + more / 64
        kept = 1 - 1 / 512
        self._products = kept * self._products + off * more
        self._squares = kept * self._squares + off * off
        weight = 16 * 4000.0**2  # as of so many steps whose context was so many tokens off
        self.value = max((self._products + weight * self._prior) / (self._squares + weight), 0.0)


def _surely(seconds: float, count: float, is_ahead: bool) -> float:
    """A draft's time, at its best where it is what steps took beyond the target's and rests on few steps or old ones: what seems to
    take too long is never tried."""
    return seconds * count / (count + 0.5) if is_ahead else seconds


def _size(sequences: int) -> int:
    """What is learnt of so many sequences is kept with what is of about as many: one less than a batch of 64 takes as long."""
    return (sequences - 1).bit_length()
