"""How often drafted tokens are right: per sequence, forgetting, with what other sequences showed as prior."""

import bisect
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

MEMORY = 24  # outcomes that a sequence's estimates rest on
SECONDS = 1.0  # after which an outcome counts a third, however few came after it
POOL_MEMORY = 96  # outcomes that the prior rests on, of any sequence
PRIOR_OUTCOMES = 2.0  # that the prior weighs in a sequence's estimate
POOL_OUTCOMES = 4.0  # that the built-in prior weighs in the learnt one
# Acceptance of a first node before anything was seen, by confidence of the proposal; 0 is a model's.
PRIORS = (0.6, 0.3, 0.45, 0.6, 0.75, 0.85)


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
    """

    tracks: dict[int, Track] = field(default_factory=dict)
    seen: float = -math.inf
    worth: float | None = None
    cost: float = 0.0


class _Pool:
    """What sequences of one confidence showed together: how much a rung brings of what the rung before it brought."""

    def __init__(self, ladder: Ladder, first: float) -> None:
        chain = [first**depth for depth in range(1, ladder.sizes[-1] + 1)]
        starts = (0, *ladder.sizes[:-1])
        sums = [sum(chain[a:b]) for a, b in zip(starts, ladder.sizes, strict=True)]
        self._prior = [after / before for before, after in zip([1.0, *sums], sums, strict=False)]
        # Accepted nodes of each rung, and of the rung before it in the same verifications.
        self.accepted = [0.0] * len(ladder)
        self.before = [0.0] * len(ladder)

    @property
    def ratios(self) -> list[float]:
        return [
            (accepted + POOL_OUTCOMES * prior) / (before + POOL_OUTCOMES)
            for accepted, before, prior in zip(self.accepted, self.before, self._prior, strict=True)
        ]


class Acceptance:
    """Estimates what each rung of a tree brings.

    Args:
        ladder: The sizes told apart.
    """

    def __init__(self, ladder: Ladder) -> None:
        self.ladder = ladder
        self._pools: dict[int, _Pool] = {}
        self._ratios: dict[int, list[float]] = {}

    def track(self, history: DraftHistory, confidence: int) -> Track:
        """The sequence's record for a confidence."""
        track = history.tracks.get(confidence)
        if track is None:
            size = len(self.ladder)
            track = history.tracks[confidence] = Track([0.0] * size, [0.0] * size)
        return track

    def gains(self, history: DraftHistory, confidence: int, now: float) -> list[float]:
        """Expected accepted nodes of each rung; per node never more than of the rung before it."""
        ratios = self._ratios.get(confidence)
        if ratios is None:
            ratios = self._ratios[confidence] = self._pool(confidence).ratios
        track = history.tracks.get(confidence)
        gains, above, density = [], 1.0, 1.0
        if track is None:
            for ratio, width in zip(ratios, self.ladder.widths, strict=True):
                above = min(above * ratio, width * density)
                density = above / width
                gains.append(above)
            return gains
        kept = _kept(now - track.seen)
        for accepted, outcomes, ratio, width in zip(
            track.accepted, track.outcomes, ratios, self.ladder.widths, strict=True
        ):
            expected = accepted * kept + PRIOR_OUTCOMES * above * ratio
            above = min(expected / (outcomes * kept + PRIOR_OUTCOMES), width * density)
            density = above / width
            gains.append(above)
        return gains

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
        whole = ladder.num_within(num_nodes)
        # A tree that ends within a rung tells of it too: there was no more to be had.
        count = min(
            whole + (whole < len(ladder) and num_nodes > (whole and ladder.sizes[whole - 1])),
            len(ladder),
        )
        hits = [0] * len(ladder)
        for node in accepted:
            if node < num_nodes:
                hits[ladder.rung_of[node]] += 1
        track = self.track(history, confidence)
        kept = _kept(now - track.seen) * (1 - 1 / MEMORY)
        for i in range(len(ladder)):
            track.accepted[i] *= kept
            track.outcomes[i] *= kept
        track.seen = history.seen = now
        pool = self._pool(confidence)
        before = 1.0
        for i in range(count):
            track.accepted[i] += hits[i]
            track.outcomes[i] += 1
            pool.accepted[i] += hits[i] - pool.accepted[i] / POOL_MEMORY
            pool.before[i] += before - pool.before[i] / POOL_MEMORY
            before = hits[i]
        self._ratios.pop(confidence, None)

    def _pool(self, confidence: int) -> _Pool:
        pool = self._pools.get(confidence)
        if pool is None:
            first = PRIORS[min(confidence, len(PRIORS) - 1)]
            pool = self._pools[confidence] = _Pool(self.ladder, first)
        return pool


def _kept(seconds: float) -> float:
    return math.exp(-seconds / SECONDS)
