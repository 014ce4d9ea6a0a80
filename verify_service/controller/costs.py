"""Estimates the seconds of steps: the target's forward by a table measured at start, and the waits
for drafts by observation.

A slower machine slows steps of all kinds, which changes no choice between them. So only the
difference between kinds of steps, beyond the table, is learnt.
"""

import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence

from verify_service.controller.acceptance import Array
from verify_service.controller.config import DEFAULT, ControllerConfig
from verify_service.controller.tables import Table

PLAIN, VERIFY = 0, 1


class CostModel:
    """Estimates the seconds of steps on the table's scale, without a slowdown of all steps.

    Args:
        table: Seconds of the target's part.
        per_token: Seconds that a token of context adds to a step, by the bytes of its KV.
        config: Numbers of the policy.
    """

    def __init__(
        self, table: Table, per_token: float = 0.0, config: ControllerConfig = DEFAULT
    ) -> None:
        self.table, self.context = table, 0
        self._config, self._per_token = config, per_token
        # Slowdowns are logarithms. Against the table: running mean of all steps, and the newest
        # steps' own. The mean follows a slower machine soon, the median of the newest ignores
        # hiccups.
        self._level, self._newest = 0.0, deque([0.0], maxlen=config.near_steps)
        self._verify_slowdown = 0.0  # how much slower steps with drafts got than plain ones
        self._slowdowns: list[float | None] = [None, None]  # by kind, of the newest steps
        self._comparisons: deque[float] = deque(maxlen=int(config.seen_enough))
        self._kind, self._has_switched, self._aged, self._num_waits = PLAIN, False, 0.0, 0
        # Newest waits by (sequences, levels), of each draft and whether it follows on the device.
        self._drafts: dict[tuple[int, bool], dict[tuple[int, int], deque[float]]] = {}

    def plain(self, batch: int) -> float:
        """Returns the seconds of a step without drafts."""
        return self.target(batch, self.table.plain_rows(batch))

    def target(self, batch: int, rows: int) -> float:
        """Returns the seconds of the target's part of a step."""
        kind = self._kind_of(batch, rows)
        return math.exp(self._verify_slowdown * kind) * self._bare(batch, rows)

    def targets(self, batch: int, rows: Array) -> Array:
        """Returns the seconds of the target's part for several numbers of rows, all with drafts."""
        bare = self.table.many(batch, rows) + self._per_token * self.context
        return math.exp(self._verify_slowdown) * bare

    def draft(self, draft: int, sequences: int, levels: int, is_ahead: bool = False) -> float:
        """Returns the seconds that a step waits for a draft.

        Args:
            draft: Number of the draft.
            sequences: Number of sequences that it drafts for.
            levels: Number of levels of the deepest tree.
            is_ahead: Whether the draft follows on the device, behind the running step.
        """
        if not levels or not sequences:
            return 0.0
        known, key = self._drafts.get((draft, is_ahead), {}), (_size(sequences), levels)
        seen = known.get(key, ())
        if len(seen) == self._config.near_steps:
            return statistics.median(seen)
        prior = self._config.prior_draft * self.table.unit
        expected = prior * (levels + 1.0)  # an answer costs about one level more than it has
        others = [one for one in known if one != key and known[one]]
        if others:
            size, level = min(others, key=lambda o: (abs(o[0] - key[0]), abs(o[1] - levels)))
            if is_ahead:  # a captured draft computes all its levels, however many are verified
                usual = self._typical(known[size, level], prior * (level + 1.0), True)
                expected = min((levels + 1.0) / (level + 1.0), 1.0) * usual
            else:
                expected = _line([(one[1], known[one]) for one in others if one[0] == size], levels)
            # Fewer sequences take a little less.
            expected /= 2 ** (max(size - key[0], 0) / (2 if is_ahead else 4))
        return self._typical(seen, expected, is_ahead)

    @property
    def is_known(self) -> bool:
        """Whether it is known how steps with and without drafts compare: on a GPU from the start,
        since captured steps take what they took when they were measured.
        """
        return self.table.is_padded or len(self._comparisons) >= self._config.near_steps

    @property
    def check_share(self) -> float:
        """Share of drafting's time for plain steps that measure their own time: half of what trials
        may cost, or all while little is known.
        """
        is_new = not self.table.is_padded and len(self._comparisons) < self._config.seen_enough
        return self._config.bank_share / (2 - is_new)

    def observe(self, batch: int, rows: int, seconds: float, is_clean: bool = True) -> None:
        """Learns from the target's part of a real step.

        Args:
            batch: Number of sequences.
            rows: Number of rows, as the table counts them.
            seconds: Seconds of the target's part.
            is_clean: Whether nothing else was done meanwhile.
        """
        config, kind = self._config, self._kind_of(batch, rows)
        self._kind, self._has_switched = kind, self._has_switched or kind != self._kind
        if not is_clean:
            return
        off = math.log(max(seconds / self._bare(batch, rows), 1e-3))
        own, before = self._slowdowns[kind], self._slowdowns[1 - kind]
        # The first step after a switch of kinds is compared with those before it, since conditions
        # are the same. With later ones, a hiccup of one step would count many times.
        if self._has_switched and before is not None:
            self._comparisons.append(off - before if kind == VERIFY else before - off)
            share = 1 / (1 + (config.prior_outcomes / len(self._comparisons)) ** 2)
            self._verify_slowdown = share * statistics.median(self._comparisons)
        if own is None or self._has_switched:
            own = off
        self._has_switched = False
        self._slowdowns[kind] = own + (off - own) * config.newest_share
        self._newest.append(off - self._verify_slowdown * kind)
        self._level += max(min(self._newest[-1] - self._level, 0.5), -0.5) * config.newest_share

    def reading(self, tokens: float) -> float:
        """Returns the seconds that a draft takes to read tokens that it lacks."""
        return self._config.read_share * self.table.row * tokens

    def waited(
        self,
        draft: int,
        sequences: int,
        levels: int,
        seconds: float,
        is_ahead: bool = False,
        unread: int = 0,
    ) -> None:
        """Learns from a real step's wait for a draft that read `unread` tokens first."""
        known = self._drafts.setdefault((draft, is_ahead), {})
        seen = known.setdefault((_size(sequences), levels), deque(maxlen=self._config.near_steps))
        seconds = max(seconds, 0.0) / math.exp(self._level)
        if unread and any(known.values()):  # what it read is part of it
            seconds = min(seconds, self.draft(draft, sequences, levels, is_ahead))
        seen.append(seconds)
        self._num_waits += 1
        # Waits of sizes that were left may come from a slow stretch, and would keep these away.
        if not (self.table.is_padded or self._num_waits % self._config.near_steps):
            self._forget_oldest(but=seen)

    def waited_within(self, draft: int, batch: int, levels: int, rows: int, seconds: float) -> None:
        """Learns the wait for a draft as the part of a step's seconds beyond the target's own."""
        target = self.target(batch, rows) * math.exp(self._level)
        self.waited(draft, batch, levels, seconds - target, is_ahead=True)

    def beyond(self, batch: int, rows: int, seconds: float) -> float:
        """Returns the seconds of a real step beyond the median of the newest steps.

        They are on the table's scale, and at most a plain step's seconds.
        """
        now, most = math.exp(statistics.median(self._newest)), self.plain(batch)
        return max(min(seconds / now - self.target(batch, rows), most), -most)

    def pass_time(self, seconds: float) -> None:
        """Lets waits age by `seconds`, so that sizes that seemed slow are tried again.

        Waits on a GPU age slowly, since a captured step always takes about as long.
        """
        slow = self._config.prior_outcomes if self.table.is_padded else 1.0
        self._aged += seconds / self._config.forget_seconds / slow
        while self._aged >= 1:
            self._aged -= 1
            self._forget_oldest()

    def _forget_oldest(self, but: Collection[float] = ()) -> None:
        """Forgets the oldest wait of each size, `but` those of one."""
        for seen in [one for known in self._drafts.values() for one in known.values()]:
            if seen and seen is not but:
                seen.popleft()

    def _typical(self, seen: Collection[float], expected: float, is_ahead: bool) -> float:
        """Returns the median of the newest waits and the expected one.

        For waits on the device, the expected one replaces all missing waits: else hiccups at the
        start could keep a draft from ever being asked again.
        """
        missing = self._config.near_steps - len(seen)
        return statistics.median([*seen, *[expected] * (missing if is_ahead else min(missing, 1))])

    def _kind_of(self, batch: int, rows: int) -> int:
        return VERIFY if rows > self.table.plain_rows(batch) else PLAIN

    def _bare(self, batch: int, rows: int) -> float:
        return self.table.seconds(batch, rows) + self._per_token * self.context


def _line(waits: Sequence[tuple[int, Collection[float]]], levels: int) -> float:
    """Returns the seconds of a wait by a line through known waits that never falls.

    A single known wait is taken as proportional to one level more than it has.

    Args:
        waits: Levels and seconds of the known waits.
        levels: Number of levels.
    """
    points = [(-1, 0.0, 1), *((level, statistics.median(one), len(one)) for level, one in waits)]
    total = sum(weight for *_, weight in points)
    middle = sum(weight * level for level, _, weight in points) / total
    mean = sum(weight * seconds for _, seconds, weight in points) / total
    spread = sum(weight * (level - middle) ** 2 for level, _, weight in points)
    slope = sum(w * (level - middle) * (seconds - mean) for level, seconds, w in points) / spread
    return max(mean + max(slope, 0.0) * (levels - middle), 0.0)


def _size(sequences: int) -> int:
    """Returns the class of a number of sequences, by powers of two; a class shares its waits."""
    return (sequences - 1).bit_length()
