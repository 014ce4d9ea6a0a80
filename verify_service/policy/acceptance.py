"""How often drafted tokens are right: per sequence, forgetting, with what other sequences showed as prior."""

import bisect
import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

MEMORY = 128  # outcomes that a sequence's estimates rest on
SECONDS = 3.0  # after which an outcome counts a third, however few came after it
POOL_MEMORY = 128  # outcomes that the prior rests on, of any sequence
PRIOR_OUTCOMES = 2.0  # that the prior weighs in a sequence's estimate
PADDED_PRIOR_OUTCOMES = 4.0  # the same where all sequences get trees of one size
DOUBT = 0.015  # what is kept of outcomes that have proved misleading
SURPRISE = 4.0  # standard deviations that outcomes may lie off what was expected of them
LEAST_VARIANCE = 0.2
RUNS = 4.0  # nodes: accepted ones come in runs, so that a single long one proves nothing
KEPT_SURPRISE = 0.67  # of what earlier steps were off, to be judged together
# The same of proposals with a confidence: how often matches of one length are right differs little between sequences (by 0.05
# to 0.15), and of a few dozen estimates by a few outcomes each, the highest are the most mistaken.
MATCH_OUTCOMES = 24.0
POOL_OUTCOMES = 4.0  # that the built-in prior weighs in the learnt one
REPEATING = 0.85  # acceptance of deeper nodes of an n-gram's proposal before anything was seen
# Acceptance of a first node before anything was seen, by confidence of the proposal; 0 is a model's.
PRIORS = (0.6, 0.25, 0.35, 0.45, 0.6, 0.75, 0.85)


class Ladder:
    """The sizes of trees that are told apart, by number of nodes.

    Args:
        sizes: Rising, the largest tree last.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        starts = (0, *self.sizes[:-1])
        self.widths = tuple(end - start for start, end in zip(starts, self.sizes, strict=True))
        self.rung_of = [bisect.bisect_right(self.sizes, node) for node in range(self.sizes[-1])]
        # By number of nodes: of how many rungs a tree tells. One that ends within a rung tells of it too: there was no more
        # to be had.
        nodes = range(1, self.sizes[-1] + 1)
        self.num_told = [0, *(bisect.bisect_left(self.sizes, node) + 1 for node in nodes)]
        # What an accepted node of each rung adds to the square of a chain's accepted nodes.
        self.squares = [2 * a - b for a, b in zip(self.sizes, self.widths, strict=True)]

    def __len__(self) -> int:
        return len(self.sizes)

    def num_within(self, num_nodes: int) -> int:
        """Rungs that lie wholly within so many nodes."""
        return bisect.bisect_right(self.sizes, num_nodes)


@dataclass(slots=True)
class Track:
    """What drafts of one confidence brought to one sequence.

    Attributes:
        accepted: Accepted nodes of each rung, forgotten with time.
        outcomes: Verifications that each rung took part in, likewise.
        seen: When the last outcome came, seconds of the policy's clock.
    """

    accepted: list[float]
    outcomes: list[float]
    seen: float = 0.0


@dataclass(slots=True)
class DraftHistory:
    """What a draft brought to one sequence.

    Attributes:
        tracks: By confidence of the proposals.
        seen: When the last outcome came, seconds of the policy's clock.
        worth: Tokens that asking for it brought beyond what verifying cost, on average; None before the first time.
        cost: Of verifying the proposal that is under way, in tokens of plain decoding.
        group: Of sequences that resemble it; each group has a prior of its own.
    """

    tracks: dict[int, Track] = field(default_factory=dict)
    seen: float = -math.inf
    worth: float | None = None
    cost: float = 0.0
    group: int = 0


class _Pool:
    """What sequences of one group showed together, with proposals of one confidence.

    Attributes:
        first: Acceptance of a first node before anything was seen.
        accepted: Accepted nodes of each rung, forgotten with time.
        before: Those of the rung before it in the same verifications; verifications for the first rung.
        seen: When the last outcome came, seconds of the policy's clock.
    """

    def __init__(self, num_rungs: int, first: float) -> None:
        self.first = first
        self.accepted = [0.0] * num_rungs
        self.before = [0.0] * num_rungs
        self.seen = 0.0

    def keep(self, share: float) -> None:
        """Lets what was seen count so much less."""
        self.accepted = [share * accepted for accepted in self.accepted]
        self.before = [share * before for before in self.before]


class Acceptance:
    """Estimates what each rung of a tree brings.

    Args:
        ladder: The sizes told apart.
        is_padded: All sequences get trees of one size. Elsewhere the likeliest nodes of all are chosen, of many estimates those that
            luck has raised: there a rung is not expected to bring more than the one above it did, however unlucky that was.
    """

    def __init__(self, ladder: Ladder, is_padded: bool = False) -> None:
        self.ladder = ladder
        self._is_padded = is_padded
        self._prior = PADDED_PRIOR_OUTCOMES if is_padded else PRIOR_OUTCOMES
        self._pools: dict[tuple[int, int], _Pool] = {}  # by group and confidence
        self._nothing = Track([0.0] * len(ladder), [0.0] * len(ladder))
        # By acceptance in percent: what each rung brings of what the one before it brings, in a chain of such nodes.
        self._chains = [_chain(ladder, max(percent, 1) / 100) for percent in range(101)]
        self._doubted = -math.inf
        # Accepted nodes beyond what was expected, and their variance: of the newest step, and of those before it.
        self._surplus = self._variance = 0.0
        self._before = (0.0, 0.0)
        self._newest: list[tuple[DraftHistory, list[int], int]] = []

    def track(self, history: DraftHistory, confidence: int) -> Track:
        """The sequence's record for a confidence."""
        track = history.tracks.get(confidence)
        if track is None:
            size = len(self.ladder)
            track = history.tracks[confidence] = Track([0.0] * size, [0.0] * size)
        return track

    def gains(self, history: DraftHistory, confidence: int, now: float) -> list[float]:
        """Expected accepted nodes of each rung; per node never more than of the rung before it, nor more than one."""
        pool, track = self._pool(history, confidence), history.tracks.get(confidence)
        if track is None:
            return self._gains(self._nothing, 0.0, pool, confidence)
        return self._gains(track, self._kept(track, now), pool, confidence)

    def _gains(self, track: Track, kept: float, pool: _Pool, confidence: int) -> list[float]:
        seen, outcomes = track.accepted, track.outcomes
        prior = MATCH_OUTCOMES if confidence else self._prior
        ratio = (pool.accepted[0] + POOL_OUTCOMES * pool.first) / (pool.before[0] + POOL_OUTCOMES)
        gain = (seen[0] * kept + prior * ratio) / (outcomes[0] * kept + prior)
        gain = min(gain, self.ladder.widths[0])
        density = gain / self.ladder.widths[0]
        # What repeats goes on repeating; a model's guesses are about as good at each depth.
        chain = self._chains[int(100 * (max(density, REPEATING) if confidence else density))]
        gains = [gain]
        for i in range(1, len(chain)):
            width = self.ladder.widths[i]
            ratio = (pool.accepted[i] + POOL_OUTCOMES * chain[i]) / (pool.before[i] + POOL_OUTCOMES)
            if confidence and width == 1:  # deeper nodes, of which less was seen, are like this one
                chain = self._chains[int(100 * min(ratio, 1.0))]
            gain = (seen[i] * kept + prior * gain * ratio) / (outcomes[i] * kept + prior)
            if not self._is_padded:
                gain = min(gain, width * density)
                density = gain / width
            gains.append(gain)
        return _falling(gains, self.ladder.widths) if self._is_padded else gains

    def num_outcomes(self, now: float) -> float:
        """Outcomes that what is known of all sequences rests on, old ones counting less."""
        pools = (pool for (_, confidence), pool in self._pools.items() if confidence == 0)
        return POOL_OUTCOMES + sum(
            pool.before[0] * math.exp((pool.seen - now) / SECONDS) for pool in pools
        )

    def record(
        self,
        history: DraftHistory,
        num_nodes: int,
        accepted: Collection[int],
        confidence: int,
        now: float,
    ) -> None:
        """Takes the outcome of the first `num_nodes` nodes of a tree, those of `accepted` were right."""
        ladder = self.ladder
        count = ladder.num_told[min(num_nodes, ladder.sizes[-1])]
        hits = [0] * len(ladder)
        for node in accepted:
            if node < num_nodes:
                hits[ladder.rung_of[node]] += 1
        track, pool = self.track(history, confidence), self._pool(history, confidence)
        kept = self._kept(track, now)
        if confidence == 0:
            self._expect(self._gains(track, kept, pool, 0), hits, count)
            self._newest.append((history, hits, count))
        kept *= 1 - 1 / MEMORY
        track.accepted = [kept * one for one in track.accepted]
        track.outcomes = [kept * one for one in track.outcomes]
        track.seen = history.seen = now
        if now > pool.seen:  # while little is drafted, few outcomes come
            pool.keep(math.exp((pool.seen - now) / SECONDS))
            pool.seen = now
        self._add(track, hits, count, pool)

    def _add(self, track: Track, hits: Sequence[int], count: int, pool: _Pool) -> None:
        before = 1.0
        for i in range(count):
            track.accepted[i] += hits[i]
            track.outcomes[i] += 1
            pool.accepted[i] += hits[i] - pool.accepted[i] / POOL_MEMORY
            pool.before[i] += before - pool.before[i] / POOL_MEMORY
            before = hits[i]

    def _expect(self, gains: Sequence[float], hits: Sequence[int], count: int) -> None:
        """Compares an outcome with what was expected of it."""
        gains = gains[:count]
        mean = sum(gains)
        # As of a chain; of a tree it is less, so that a change is noticed later.
        square = sum(map(operator.mul, gains, self.ladder.squares))
        self._surplus += sum(hits) - mean
        self._variance += min(square - mean * mean, mean * (1 + mean))

    def judge(self, now: float) -> bool:
        """Looks whether the outcomes of the newest step agree with what was expected; if not, acceptance has changed.

        Returns:
            Whether more was accepted than expected.
        """
        if not self._newest:
            return False
        is_change = is_better = False
        surplus, variance = self._surplus, self._variance
        self._surplus = surplus + KEPT_SURPRISE * self._before[0]
        self._variance = variance + KEPT_SURPRISE * self._before[1]
        self._before = (self._surplus, self._variance)
        for off, spread in ((surplus, variance), self._before):
            if off**2 > SURPRISE**2 * max(spread, LEAST_VARIANCE) + RUNS * max(off, 0.0):
                is_change, is_better = True, off > 0
        if is_change:
            self.doubt(now)
            for history, hits, count in self._newest:
                track = self.track(history, 0)
                track.accepted = [DOUBT * accepted for accepted in track.accepted]
                track.outcomes = [DOUBT * outcomes for outcomes in track.outcomes]
                track.seen = math.nextafter(now, math.inf)
                self._add(track, hits, count, self._pool(history, 0))
        self._newest.clear()
        self._surplus = self._variance = 0.0
        return is_better

    def doubt(self, now: float) -> None:
        """What was seen until now has proved misleading."""
        self._doubted = now
        self._before = (0.0, 0.0)
        for pool in self._pools.values():
            pool.keep(DOUBT)

    def _kept(self, track: Track, now: float) -> float:
        """The weight of a sequence's earlier outcomes."""
        kept = math.exp((track.seen - now) / SECONDS)
        return kept * DOUBT if track.seen <= self._doubted else kept

    def _pool(self, history: DraftHistory, confidence: int) -> _Pool:
        key = history.group, confidence
        pool = self._pools.get(key)
        if pool is None:
            first = PRIORS[min(confidence, len(PRIORS) - 1)]
            pool = self._pools[key] = _Pool(len(self.ladder), first)
        return pool


def _falling(gains: list[float], widths: Sequence[int]) -> list[float]:
    """The nearest of which none has more per node than the one before it: of those that have, all get their mean, which keeps the sum.

    To cut them instead would take whatever is deeper for as bad as the unluckiest above it.
    """
    blocks: list[tuple[float, int, int]] = []  # gain, nodes, rungs
    for gain, width in zip(gains, widths, strict=True):
        count = 1
        while blocks and gain * blocks[-1][1] > blocks[-1][0] * width:
            before, nodes, rungs = blocks.pop()
            gain, width, count = gain + before, width + nodes, count + rungs
        blocks.append((gain, width, count))
    if len(blocks) == len(gains):
        return gains
    found: list[float] = []
    for gain, width, count in blocks:
        found += [gain / width * own for own in widths[len(found) : len(found) + count]]
    return found


def _chain(ladder: Ladder, acceptance: float) -> list[float]:
    starts = (0, *ladder.sizes[:-1])
    sums = [
        sum(acceptance**depth for depth in range(start + 1, end + 1))
        for start, end in zip(starts, ladder.sizes, strict=True)
    ]
    return [after / before for before, after in zip([1.0, *sums], sums, strict=False)]
