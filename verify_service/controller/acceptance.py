"""How often one draft's tokens are right: Beta-Bernoulli by size of the tree, of all sequences and of each, with forgetting."""

import bisect
import functools
import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from verify_service.controller.config import DEFAULT, ControllerConfig
from verify_service.controller.messages import DraftHistory

Array = NDArray[np.float64]
MOST_CONFIDENCE = 6  # longer matches count as this long
# Standard deviations that outcomes may lie off what was expected, share of earlier steps' in that, and what is kept then.
SURPRISE, KEPT_SURPRISE, DOUBT = 4.0, 0.8, 0.05
LEAST_VARIANCE = 0.5
FORGET_EVERY = 1 / 256  # of the time in which two thirds are forgotten
NOTHING = 0  # the row of a sequence of which nothing is known


class Ladder:
    """The tree sizes that are told apart; a bin is what one size has beyond the one before it.

    Args:
        sizes: Numbers of nodes, rising, the largest tree last.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.widths = np.diff((0, *self.sizes)).astype(float)
        self.bin_of = [bisect.bisect_right(self.sizes, node) for node in range(self.sizes[-1])]
        # What an accepted node of each bin adds to the square of a chain's accepted nodes.
        self.squares = 2 * np.array(self.sizes) - self.widths
        # A tree that ends within a bin tells of it too: there was no more to be had.
        nodes = range(1, self.sizes[-1] + 1)
        self.num_told = [0, *(bisect.bisect_left(self.sizes, node) + 1 for node in nodes)]

    def __len__(self) -> int:
        return len(self.sizes)

    def num_within(self, num_nodes: int) -> int:
        """Number of bins that lie wholly within so many nodes."""
        return bisect.bisect_right(self.sizes, num_nodes)

    @functools.cached_property
    def chains(self) -> Array:
        """By chance of a node in percent: what each bin brings of what the one before it brings, in a chain of such nodes."""
        chances = np.maximum(np.arange(101), 1)[:, None] / 100
        powers = np.cumsum(chances ** np.arange(1, self.sizes[-1] + 1), axis=1)
        ends = np.concatenate([np.zeros((101, 1)), powers[:, np.array(self.sizes) - 1]], axis=1)
        sums = np.diff(ends, axis=1)
        ratios = sums.copy()
        ratios[:, 1:] /= np.maximum(sums[:, :-1], 1e-300)
        return ratios


class Acceptance:
    """Estimates what each bin of a draft's trees brings.

    A bin's outcomes are counted only where a tree reached it, and against those of the bin before it: a tree that was accepted whole
    says nothing of what lies behind it. A sequence's estimate is its own outcomes, with those of all sequences as prior; theirs has
    a chain of equal chances as prior. What sampled sequences show has what greedy ones show as prior of its first bin.

    Args:
        ladder: The sizes told apart.
    """

    def __init__(self, ladder: Ladder, config: ControllerConfig = DEFAULT) -> None:
        self.ladder = ladder
        self._config = config
        num_pools, size = 2 * (MOST_CONFIDENCE + 1), len(ladder)
        self._hits, self._before = np.zeros((2, num_pools, size))
        self._recent = np.zeros((2, num_pools, size))  # the same of the last few steps
        self._own_hits, self._own_tries = np.zeros((2, 64, size))
        self._free = list(range(63, NOTHING, -1))
        self._pending: list[tuple[int, int, int, Collection[int]]] = []
        self._now = 0.0
        self._surplus = self._variance = (
            0.0  # accepted nodes beyond what was expected lately, and their variance
        )
        self._ratios: dict[tuple[int, bool], Array] = {}

    def pool(self, history: DraftHistory, confidence: int) -> int:
        """Number of the pool that a proposal to a sequence belongs to."""
        return 2 * min(confidence, MOST_CONFIDENCE) + history.group

    def row(self, history: DraftHistory, draft: int, confidence: int) -> int:
        """Number of the row of a sequence's outcomes, `NOTHING` before the first."""
        return history.tracks.get((draft, min(confidence, MOST_CONFIDENCE)), NOTHING)

    def gains(
        self, rows: Sequence[int], pools: Sequence[int], is_optimistic: bool = False
    ) -> Array:
        """Expected accepted nodes of each bin, by proposal; per node never more than of the bin before it.

        Args:
            is_optimistic: Bins of which little was seen are taken to be one standard deviation better.
        """
        if self._pending:
            self._flush()
        known = {pool: self._ratio(pool, is_optimistic) for pool in set(pools)}
        ratios = np.stack([known[pool] for pool in pools])
        tries, prior = self._own_tries[list(rows)], self._config.own_outcomes
        gains = np.empty_like(ratios)
        before: Array | float = 1.0
        posterior = (self._own_hits[list(rows)], tries + prior)
        for i in range(ratios.shape[1]):
            before = (posterior[0][:, i] + prior * before * ratios[:, i]) / posterior[1][:, i]
            gains[:, i] = before
        gains = np.minimum(gains, self.ladder.widths)
        return falling(gains, self.ladder.widths)

    @property
    def num_outcomes(self) -> float:
        """Number of outcomes that estimates rest on, old ones counting less."""
        self._flush()
        return float(self._before[:, 0].sum())

    def record(
        self,
        history: DraftHistory,
        draft: int,
        num_nodes: int,
        accepted: Collection[int],
        confidence: int,
    ) -> None:
        """Takes the outcome of the first `num_nodes` nodes of a tree; those of `accepted` were right."""
        key = draft, min(confidence, MOST_CONFIDENCE)
        row = history.tracks.get(key)
        if row is None:
            if not self._free:
                self._grow()
            row = history.tracks[key] = self._free.pop()
            self._own_hits[row] = self._own_tries[row] = 0.0
        self._pending.append((row, self.pool(history, confidence), num_nodes, accepted))

    def forget(self, history: DraftHistory, draft: int) -> None:
        """The sequence has ended."""
        self._flush()
        self._free += [row for (number, _), row in history.tracks.items() if number == draft]

    def pass_time(self, seconds: float) -> None:
        """So many seconds have passed, in which evidence grows old."""
        self._now += seconds
        if self._now >= FORGET_EVERY * self._config.forget_seconds:
            kept = math.exp(-self._now / self._config.forget_seconds)
            self._hits *= kept
            self._before *= kept
            self._ratios.clear()
            self._now = 0.0

    def _flush(self) -> None:
        ladder, config, pending = self.ladder, self._config, self._pending
        if not pending:
            return
        hits, told = np.zeros((2, len(pending), len(ladder)))
        for i, (_, _, num_nodes, accepted) in enumerate(pending):
            told[i, : ladder.num_told[min(num_nodes, ladder.sizes[-1])]] = 1.0
            for node in accepted:
                if node < num_nodes:
                    hits[i, ladder.bin_of[node]] += 1.0
        self._doubt(hits, told)
        for pool in {pool for _, pool, _, _ in pending}:
            self._recent[:, pool] *= KEPT_SURPRISE
        before = told.copy()
        before[:, 1:] *= hits[:, :-1]
        for i, (row, pool, _, _) in enumerate(pending):
            own, pooled = 1 - told[i] / config.own_memory, 1 - told[i] / config.pool_memory
            self._own_hits[row] = own * self._own_hits[row] + hits[i]
            self._own_tries[row] = own * self._own_tries[row] + told[i]
            self._hits[pool] = pooled * self._hits[pool] + hits[i]
            self._before[pool] = pooled * self._before[pool] + before[i]
            self._recent[0, pool] += hits[i]
            self._recent[1, pool] += before[i]
        pending.clear()
        self._ratios.clear()

    def _doubt(self, hits: Array, told: Array) -> None:
        """Drops all but the newest evidence if outcomes lie far off what was expected of them: then acceptance has changed."""
        pending, self._pending = self._pending, []
        expected = self.gains([row for row, *_ in pending], [pool for _, pool, *_ in pending])
        self._pending = pending
        expected *= told
        mean = expected.sum(axis=1)
        # As of chains; of trees it is less, so that a change is noticed later.
        spreads = np.minimum(expected @ self.ladder.squares - mean**2, mean * (1 + mean))
        off, spread = float(hits.sum() - mean.sum()), float(spreads.sum())
        self._surplus = KEPT_SURPRISE * self._surplus + off
        self._variance = KEPT_SURPRISE**2 * self._variance + spread
        if self._surplus**2 > SURPRISE**2 * max(self._variance, LEAST_VARIANCE):
            self._surplus = self._variance = 0.0
            self._hits, self._before = DOUBT * self._recent
            self._own_hits[:] = self._own_tries[:] = 0.0

    def _ratio(self, pool: int, is_optimistic: bool) -> Array:
        """What each bin brings of what the one before it brings, in a pool."""
        found = self._ratios.get((pool, is_optimistic))
        if found is None:
            found = self._ratios[pool, is_optimistic] = self._new_ratio(pool, is_optimistic)
        return found

    def _new_ratio(self, pool: int, is_optimistic: bool) -> Array:
        config, widths, prior = self._config, self.ladder.widths, self._config.pool_outcomes
        hits, before = self._hits[pool], self._before[pool]
        confidence, group = divmod(pool, 2)
        first = min(config.prior_match * confidence, 1.0) if confidence else config.prior_chance
        chain = self.ladder.chains[int(100 * first)]
        least = chain[0]
        if group:
            greedy, tries = self._hits[pool - 1, 0], self._before[pool - 1, 0]
            least = (greedy + prior * least) / (tries + prior)
        density = (hits[0] + prior * least) / (before[0] + prior) / widths[0]
        if confidence:
            density = max(density, config.prior_repeat)
        chain = self.ladder.chains[min(int(100 * density + 0.5), 100)].copy()
        chain[0] = least
        ratio: Array = (hits + prior * chain) / (before + prior)
        if confidence:  # deeper nodes, of which less was seen, are like those that were
            for i in range(2, len(ratio)):
                ratio[i] = (hits[i] + prior * ratio[i - 1]) / (before[i] + prior)
        if is_optimistic:
            share = np.minimum(ratio / np.maximum(widths, 1.0), 1.0)
            spread = np.sqrt(share * (1 - share) / (before + prior + 1)) * np.maximum(widths, 1.0)
            ratio = ratio + np.where(before < config.seen_enough, spread, 0.0)
        return ratio

    def _grow(self) -> None:
        size = len(self._own_hits)
        more = np.zeros_like(self._own_hits)
        self._own_hits = np.concatenate([self._own_hits, more])
        self._own_tries = np.concatenate([self._own_tries, more])
        self._free = list(range(2 * size - 1, size - 1, -1))


def falling(gains: Array, widths: Array) -> Array:
    """The nearest gains none of which is more per node than the one before it (pool adjacent violators, row by row)."""
    density = gains / widths
    for i in np.flatnonzero((density[:, 1:] > density[:, :-1] + 1e-12).any(axis=1)):
        blocks: list[tuple[float, float, int]] = []  # gain, nodes, bins
        for gain, width in zip(gains[i], widths, strict=True):
            count = 1
            while blocks and gain * blocks[-1][1] > blocks[-1][0] * width:
                before, nodes, bins = blocks.pop()
                gain, width, count = gain + before, width + nodes, count + bins
            blocks.append((gain, width, count))
        gains[i] = np.repeat([g / w for g, w, _ in blocks], [c for _, _, c in blocks]) * widths
    return gains
