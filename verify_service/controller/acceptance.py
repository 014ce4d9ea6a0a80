"""Estimates how often a draft's tokens are right: Beta-Bernoulli by tree size, with forgetting, for
all sequences together and for each.
"""

import bisect
import functools
import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from verify_service.controller.config import DEFAULT, ControllerConfig
from verify_service.controller.doubt import Doubt
from verify_service.controller.messages import MOST_CONFIDENCE, DraftHistory

Array = NDArray[np.float64]
NOTHING = 0  # row of a sequence without outcomes


class SizeBins:
    """The tree sizes that estimates distinguish. A bin has the nodes between one size and the next.

    Args:
        sizes: Numbers of nodes, rising, the largest tree last.
        depth: Number of levels of the largest tree; 0 for chains.
    """

    def __init__(self, sizes: Sequence[int], depth: int = 0) -> None:
        self.depth = depth
        self.sizes = tuple(sizes)
        self.widths = np.diff((0, *self.sizes)).astype(float)
        self.bin_of = [bisect.bisect_right(self.sizes, node) for node in range(self.sizes[-1])]
        # By bin: what an accepted node adds to the square of a chain's number of accepted nodes.
        self.squares = 2 * np.array(self.sizes) - self.widths
        # A tree that ends within a bin counts as an outcome of the whole bin.
        nodes = range(1, self.sizes[-1] + 1)
        num_told = [0, *(bisect.bisect_left(self.sizes, node) + 1 for node in nodes)]
        # By number of nodes: 1 for each bin that a tree tells of, else 0.
        self.told = np.tri(len(self) + 1, len(self), -1)[num_told]

    def __len__(self) -> int:
        return len(self.sizes)

    def num_within(self, num_nodes: int) -> int:
        """Returns the number of bins that lie wholly within `num_nodes` nodes."""
        return bisect.bisect_right(self.sizes, num_nodes)

    @functools.cached_property
    def chains(self) -> Array:
        """Ratios of each bin's accepted nodes to the previous bin's, [101, bins].

        Row p is for a chain whose nodes are right with a chance of p percent.
        """
        chances = np.maximum(np.arange(101), 1)[:, None] / 100
        powers = np.cumsum(chances ** np.arange(1, self.sizes[-1] + 1), axis=1)
        powers = np.minimum(powers, (self.depth or self.sizes[-1]) * chances)
        sums = np.diff(powers[:, np.array(self.sizes) - 1], axis=1, prepend=0.0)
        sums[:, 1:] /= np.maximum(sums[:, :-1], 1e-300)
        return sums


class Acceptance:
    """Estimates the accepted nodes of each bin of a draft's trees.

    A bin's outcomes are counted only for trees that reached it, and relative to the bin before it,
    since a tree that was accepted whole shows nothing about larger trees. A sequence's estimate has
    the outcomes of all sequences as prior. The estimate of all sequences has a chain of equal
    chances as prior; for sampled sequences, the first bin's prior is the estimate of greedy ones.

    Args:
        bins: Tree sizes to distinguish.
        config: Numbers of the policy.
        own: Weight of the outcomes of all sequences in the estimate for one, for proposals without
            confidence; 0 for that of any prior.
    """

    def __init__(self, bins: SizeBins, config: ControllerConfig = DEFAULT, own: float = 0) -> None:
        self.bins = bins
        self._own_prior = own or config.prior_outcomes
        self._config = config
        num_pools, size = 2 * (MOST_CONFIDENCE + 1), len(bins)
        # Accepted nodes, and what they are counted against: [pools or rows, 2, bins].
        self._pools, self._own = np.zeros((num_pools, 2, size)), np.zeros((64, 2, size))
        self._free = list(range(63, NOTHING, -1))
        self._pending: list[tuple[int, int, int, Collection[int]]] = []
        self._doubt = Doubt(config)
        # Difference between recent accepted nodes and their expectation, and its variance; and
        # seconds since evidence was last reduced.
        self._surplus = self._variance = self._unaged = 0.0
        self._ratios: dict[tuple[int, float], Array] = {}

    def pool(self, history: DraftHistory, confidence: int) -> int:
        """Returns the number of the pool that a proposal to a sequence belongs to."""
        return 2 * min(confidence, MOST_CONFIDENCE) + history.group

    def row(self, history: DraftHistory, draft: int, confidence: int) -> int:
        """Returns the row of a sequence's outcomes; `NOTHING` before the first outcome."""
        return history.tracks.get((draft, min(confidence, MOST_CONFIDENCE)), NOTHING)

    def gains(self, rows: Sequence[int], pools: Sequence[int], deviations: float = 0.0) -> Array:
        """Returns the expected accepted nodes by proposal and bin, [proposals, bins].

        Per node they never exceed the previous bin's.

        Args:
            rows: Row of each proposal's sequence, see `row`.
            pools: Pool of each proposal, see `pool`.
            deviations: Number of standard deviations that the pools' estimates are raised by;
                positive ones raise only bins with few outcomes. Others count the doubt whether
                chances have fallen, too, for proposals without confidence.
        """
        gains = self._estimates(rows, pools, deviations)
        if deviations <= 0:
            changed = self.bins.chains[int(100 * self._doubt.chance)].cumprod()
            doubt = (np.array(pools) < 2)[:, None] * self._doubt.odds / (1 + self._doubt.odds)
            gains += doubt * np.minimum(changed - gains, 0.0)
        return gains

    def _estimates(self, rows: Sequence[int], pools: Sequence[int], deviations: float) -> Array:
        """Returns the expected accepted nodes by proposal and bin if no chance has changed."""
        known, priors = list(set(pools)), (self._own_prior, self._config.prior_outcomes)
        places = slice(None) if len(known) == 1 else [known.index(pool) for pool in pools]
        ratios = np.array([self._ratio(pool, deviations) for pool in known])[places]
        prior = np.array([priors[pool > 1] for pool in known])[places]
        hits, tries = self._own.take(rows, 0).transpose(1, 2, 0)
        before, columns = np.ones(1), []
        for ratio, hit, tried in zip(ratios.T, hits, tries + prior, strict=True):
            before = (hit + prior * before * ratio) / tried
            columns.append(before)
        gains = np.minimum(np.array(columns).T, self.bins.widths, order="C")
        return falling(gains, self.bins.widths)

    def evidence(self, groups: Collection[int]) -> float:
        """Returns the number of outcomes of the group of sequences that has fewest."""
        return float(self._pools[list(groups), 1, 0].min())

    @property
    def num_outcomes(self) -> float:
        """Number of outcomes behind the estimates; old outcomes count less."""
        return float(self._pools[:, 1, 0].sum())

    def record(
        self,
        history: DraftHistory,
        draft: int,
        num_nodes: int,
        accepted: Collection[int],
        confidence: int,
    ) -> None:
        """Records an outcome of a tree's first `num_nodes` nodes; `accepted` were right."""
        key = draft, min(confidence, MOST_CONFIDENCE)
        row = history.tracks.get(key)
        if row is None:
            if not self._free:
                self._grow()
            row = history.tracks[key] = self._free.pop()
            self._own[row] = 0.0
        self._pending.append((row, self.pool(history, confidence), num_nodes, accepted))

    def forget(self, history: DraftHistory, draft: int) -> None:
        """Frees the rows of a sequence that has ended."""
        self.learn()
        self._free += [row for (number, _), row in history.tracks.items() if number == draft]

    def pass_time(self, seconds: float, steps: float) -> None:
        """Lets evidence age by `seconds`, and doubt by the number of plain steps that they hold:
        stretches of a text that are hard to guess are so many tokens long.
        """
        self._doubt.odds *= math.exp(-steps / self._config.near_steps)
        self._unaged += seconds
        if self._unaged < self._config.look_seconds:
            return
        kept = math.exp(-self._unaged / self._config.forget_seconds)
        self._unaged = 0.0
        self._pools *= kept
        self._ratios.clear()

    def learn(self, most: int = 0) -> bool:
        """Counts the outcomes that were recorded, if there are more than `most`; returns whether it
        did.
        """
        bins, config, pending = self.bins, self._config, self._pending
        if len(pending) <= most:
            return False
        rows, pools, sizes, _ = zip(*pending, strict=True)
        told, size = bins.told[np.minimum(sizes, bins.sizes[-1])], len(bins)
        places = [
            i * size + bins.bin_of[node]
            for i, (_, _, num_nodes, accepted) in enumerate(pending)
            for node in accepted
            if node < num_nodes
        ]
        hits = np.bincount(places, minlength=told.size).reshape(told.shape).astype(float)
        before = np.concatenate((told[:, :1], told[:, 1:] * hits[:, :-1]), 1)
        gains = self._estimates(rows, pools, 0.0)
        # Sequences of a step may be alike: together they show a change as a few do, and no step
        # outvotes all others.
        weight = min(config.seen_enough / len(set(rows)), 1.0)
        share = min(config.prior_outcomes / len(set(rows)), 1.0)
        # A bin counts as one try, however many nodes it has: right by the share that was accepted.
        right, mean = (hits / bins.widths)[before > 0], before * gains / bins.widths
        mean[:, 1:] /= np.maximum(gains[:, :-1], 1e-9)  # given the bin before
        sums = right.sum(), (1 - right).sum(), np.minimum(mean, 1.0).sum()
        self._doubt.record(*(share * float(one) for one in sums))
        # Outcomes far from their expectation mean a change: nothing but the newest counts then.
        means, kept = told * gains, 1 - config.newest_share
        mean = means.sum(axis=1)
        self._surplus = kept * self._surplus + share * float(hits.sum() - mean.sum())
        # Variances as of chains. Trees have smaller ones, so their changes are seen later.
        spreads = np.minimum(means @ bins.squares - mean**2, mean * (1 + mean))
        self._variance = kept**2 * self._variance + share * float(spreads.sum())
        if self._surplus**2 > config.surprise**2 * max(self._variance, 0.5):
            self._surplus = self._variance = 0.0
            self._pools[:] = self._own[:] = 0.0
            self._doubt = Doubt(config)
        new = np.stack((hits, told, before), 1)
        _add(self._own, rows, 1 - told / config.own_memory, new[:, :2])
        _add(self._pools, pools, 1 - weight * told / config.pool_memory, weight * new[:, ::2])
        pending.clear()
        self._ratios.clear()
        return True

    def _ratio(self, pool: int, deviations: float) -> Array:
        """Returns the ratios of each bin's accepted nodes to the previous bin's, in a pool."""
        if (pool, deviations) not in self._ratios:
            self._ratios[pool, deviations] = self._new_ratio(pool, deviations)
        return self._ratios[pool, deviations]

    def _new_ratio(self, pool: int, deviations: float) -> Array:
        config, widths, prior = self._config, self.bins.widths, self._config.prior_outcomes
        hits, before = self._pools[pool]
        confidence, group = divmod(pool, 2)
        first = min(config.prior_match * confidence, 1.0) if confidence else config.prior_chance
        least = self.bins.chains[int(100 * first), 0]
        if group:
            greedy, tries = self._pools[pool - 1, :, 0]
            least = (greedy + prior * least) / (tries + prior)
        density = (hits[0] + prior * least) / (before[0] + prior) / widths[0]
        if confidence:
            density = max(density, config.prior_repeat)
        chain = self.bins.chains[min(int(100 * density + 0.5), 100)].copy()
        chain[0] = least
        ratio: Array = (hits + prior * chain) / (before + prior)
        if confidence:  # deeper bins have fewer outcomes, so the previous bin is their prior
            for i in range(2, len(ratio)):
                ratio[i] = (hits[i] + prior * ratio[i - 1]) / (before[i] + prior)
        if deviations:
            share = np.minimum(ratio / widths, 1.0)
            spread = np.sqrt(share * (1 - share) / (before + prior + 1)) * widths
            if deviations > 0:
                spread[before >= config.seen_enough] = 0.0
            ratio = np.maximum(ratio + deviations * spread, 0.0)
        return ratio

    def _grow(self) -> None:
        size = len(self._own)
        self._own = np.concatenate([self._own, np.zeros_like(self._own)])
        self._free = list(range(2 * size - 1, size - 1, -1))


def _add(sums: Array, places: Sequence[int], kept: Array, new: Array) -> None:
    """Adds outcomes to sums, one after the other; each keeps a share of what its sum had before.

    Args:
        sums: [places, 2, bins].
        places: Place of each outcome.
        kept: Share that is kept, [outcomes, bins].
        new: The outcomes, [outcomes, 2, bins].
    """
    if len(set(places)) == len(places):
        sums[list(places)] = sums[list(places)] * kept[:, None] + new
        return
    for place in set(places):
        own = [i for i, one in enumerate(places) if one == place]
        left = kept[own][::-1].cumprod(axis=0)[::-1]  # after each outcome and all later ones
        later = np.concatenate((left[1:], np.ones_like(left[:1])))
        sums[place] = sums[place] * left[0] + (later[:, None] * new[own]).sum(axis=0)


def falling(gains: Array, widths: Array) -> Array:
    """Returns the nearest gains that do not increase per node (pool adjacent violators, by row)."""
    density, wide = gains / widths, widths.tolist()
    for i in np.nonzero((density[:, 1:] > density[:, :-1] + 1e-12).any(axis=1))[0]:
        blocks: list[tuple[float, float, int]] = []  # gain, nodes, bins
        for gain, width in zip(gains[i].tolist(), wide, strict=True):
            count = 1
            while blocks and gain * blocks[-1][1] > blocks[-1][0] * width:
                before, nodes, bins = blocks.pop()
                gain, width, count = gain + before, width + nodes, count + bins
            blocks.append((gain, width, count))
        gains[i] = np.repeat([g / w for g, w, _ in blocks], [c for _, _, c in blocks]) * widths
    return gains
