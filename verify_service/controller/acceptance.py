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
NOTHING = 0  # track of a sequence without outcomes


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
        # By bin: its nodes; what an accepted one adds to the square of a chain's accepted nodes.
        self.measures = self.widths.tolist(), (2 * np.array(self.sizes) - self.widths).tolist()
        nodes = range(self.sizes[-1] + 1)
        # By number of nodes: number of bins that a tree tells of; one that ends within a bin counts
        # as an outcome of the whole bin.
        self.num_told = [0, *(bisect.bisect_left(self.sizes, node) + 1 for node in nodes[1:])]
        # By number of bins: 1 for so many first ones, else 0; by number of nodes: likewise for bins
        # that lie wholly within them.
        self.first = np.tri(len(self) + 1, len(self), -1)
        self.within = self.first[[self.num_within(node) for node in nodes]]

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

    A bin's outcomes are counted only for trees that reached it, since a tree that was accepted
    whole shows nothing about larger trees. There are two kinds of sums. A pool has those of all
    proposals that are alike: a bin's accepted nodes for each accepted node of the bin before. A
    sequence has its own: a bin's accepted nodes for each tree.

    A sequence's estimate has its pool's as prior. A pool's prior is a chain of equal chances; for
    sampled sequences, the first bin's is the estimate of greedy ones.

    Args:
        bins: Tree sizes to distinguish.
        config: Numbers of the policy.
        own_prior: Weight of the outcomes of all sequences in the estimate for one, for proposals
            without confidence; 0 for that of any prior.
    """

    def __init__(
        self, bins: SizeBins, config: ControllerConfig = DEFAULT, own_prior: float = 0
    ) -> None:
        self.bins, self._config, self._doubt = bins, config, Doubt(config)
        self._own_prior = own_prior or config.prior_outcomes
        num_pools, size = 2 * (MOST_CONFIDENCE + 1), len(bins)
        # Accepted nodes, and what they count against, which are accepted nodes of the bin before
        # (pools), or trees (tracks): [pools or tracks, 2, bins].
        self._pools, self._tracks = np.zeros((num_pools, 2, size)), np.zeros((64, 2, size))
        self._free = list(range(63, NOTHING, -1))
        # Outcomes to count: track, pool, number of bins told of, and accepted nodes by bin.
        self._pending: list[tuple[int, int, int, list[int]]] = []
        # Difference between recent accepted nodes and their expectation, and its variance; and
        # seconds since evidence was last reduced.
        self._surplus = self._variance = self._unaged = 0.0
        self._ratios: dict[tuple[int, float], list[float]] = {}

    # Pools 0 and 1 are of proposals without confidence, to greedy and to sampled sequences.

    def pool(self, history: DraftHistory, confidence: int) -> int:
        """Returns the number of the pool that a proposal to a sequence belongs to."""
        return 2 * min(confidence, MOST_CONFIDENCE) + history.group

    def track(self, history: DraftHistory, draft: int, confidence: int) -> int:
        """Returns the number of a sequence's sums; `NOTHING` before the first outcome."""
        return history.tracks.get((draft, min(confidence, MOST_CONFIDENCE)), NOTHING)

    def gains(self, tracks: Sequence[int], pools: Sequence[int], deviations: float = 0.0) -> Array:
        """Returns the expected accepted nodes by proposal and bin, [proposals, bins].

        Per node they never exceed the previous bin's.

        Args:
            tracks: Track of each proposal's sequence, see `track`.
            pools: Pool of each proposal, see `pool`.
            deviations: Number of standard deviations that the pools' estimates are raised by;
                positive ones raise only bins with few outcomes. Others count the doubt whether
                chances have fallen, too, for proposals without confidence.
        """
        gains = self._estimates(tracks, pools, deviations)
        if deviations <= 0:
            changed = self.bins.chains[int(100 * self._doubt.chance)].cumprod()
            doubt = (np.array(pools) < 2)[:, None] * self._doubt.odds / (1 + self._doubt.odds)
            gains += doubt * np.minimum(changed - gains, 0.0)
        return gains

    def _estimates(self, tracks: Sequence[int], pools: Sequence[int], deviations: float) -> Array:
        """Returns the expected accepted nodes by proposal and bin if no chance has changed."""
        known, priors = list(set(pools)), (self._own_prior, self._config.prior_outcomes)
        places = [known.index(pool) for pool in pools] if len(known) > 1 else [0]
        ratios = np.array([self._ratio(pool, deviations) for pool in known]).T.take(places, 1)
        prior = np.array([priors[pool > 1] for pool in known]).take(places)
        hits, tries = self._tracks.take(tracks, 0).transpose(1, 2, 0)
        before, columns = prior, []
        for ratio, hit, tried in zip(ratios, hits, tries + prior, strict=True):
            columns.append((hit + before * ratio) / tried)
            before = prior * columns[-1]
        gains = np.minimum(np.array(columns).T, self.bins.widths, order="C")
        return falling(gains, self.bins.widths)

    def evidence(self, groups: Collection[int]) -> float:
        """Returns the number of outcomes without confidence of the group of sequences that has
        fewest.
        """
        return min(self._pools.item(group, 1, 0) for group in groups)

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
        track = history.tracks.get(key)
        if track is None:
            if not self._free:
                size = len(self._tracks)
                self._tracks = np.concatenate([self._tracks, np.zeros_like(self._tracks)])
                self._free = list(range(2 * size - 1, size - 1, -1))
            track = history.tracks[key] = self._free.pop()
            self._tracks[track] = 0.0
        bins, counts = self.bins, [0] * len(self.bins)
        for node in accepted:
            if node < num_nodes:
                counts[bins.bin_of[node]] += 1
        told = bins.num_told[min(num_nodes, bins.sizes[-1])]
        self._pending.append((track, self.pool(history, confidence), told, counts))

    def forget(self, history: DraftHistory, draft: int) -> None:
        """Frees the tracks of a sequence that has ended."""
        self.learn()
        self._free += [track for (number, _), track in history.tracks.items() if number == draft]

    def pass_time(self, seconds: float, steps: float) -> None:
        """Lets evidence age by `seconds`, and doubt by the number of plain steps that they hold:
        stretches of a text that are hard to guess are so many tokens long.
        """
        self._doubt.odds *= math.exp(-steps / self._config.near_steps)
        self._unaged += seconds
        if self._unaged < self._config.look_seconds:
            return
        self._pools *= math.exp(-self._unaged / self._config.forget_seconds)
        self._unaged = 0.0
        self._ratios.clear()

    def learn(self, most: int = 0) -> bool:
        """Counts the outcomes that were recorded, if there are more than `most`; returns whether it
        did.
        """
        config, pending = self._config, self._pending
        if len(pending) <= most:
            return False
        self._look_for_change()
        tracks, pools, told, outcomes = zip(*pending, strict=True)
        weight = min(config.seen_enough / len(set(tracks)), 1.0)  # no step outvotes all others
        tried = self.bins.first.take(told, 0)
        new = np.array((outcomes, tried, tried))
        new[2, :, 1:] *= new[0, :, :-1]  # pools count nodes against those of the bin before
        _add(self._tracks, tracks, 1 - tried / config.own_memory, new[:2])
        _add(self._pools, pools, 1 - weight * tried / config.pool_memory, weight * new[::2])
        pending.clear()
        self._ratios.clear()
        return True

    def _look_for_change(self) -> None:
        """Compares the recorded outcomes with what was expected; forgets older outcomes if they are
        too far from it.
        """
        bins, config = self.bins, self._config
        tracks, pools, told, outcomes = zip(*self._pending, strict=True)
        # Sequences of a step may be alike: together they show a change as a few do.
        share = min(config.prior_outcomes / len(set(tracks)), 1.0)
        expected = self._estimates(tracks, pools, 0.0).tolist()
        right = tries = known = surplus = variance = 0.0
        for num, counts, gains in zip(told, outcomes, expected, strict=True):
            # Accepted nodes of the bin before, and their expectation; both of all bins so far.
            before, above, mean, square = 1, 1.0, 0.0, 0.0
            for count, gain, width, more in zip(counts[:num], gains, *bins.measures, strict=False):
                if before:  # a bin is one try: right by the share of its nodes that was accepted
                    right += count / width
                    tries += 1
                    known += before * gain / width / above
                before, above, mean, square = count, gain or 1.0, mean + gain, square + gain * more
            surplus += sum(counts) - mean
            # Variances as of chains. Trees have smaller ones, so their changes are seen later.
            variance += min(square - mean**2, mean * (1 + mean))
        self._doubt.record(share * right, share * (tries - right), share * known)
        # Outcomes far from their expectation mean a change: nothing but the newest counts then.
        kept = 1 - config.newest_share
        self._surplus = kept * self._surplus + share * surplus
        self._variance = kept**2 * self._variance + share * variance
        if self._surplus**2 > config.surprise**2 * max(self._variance, 0.5):
            self._surplus = self._variance = 0.0
            self._pools[:] = self._tracks[:] = 0.0
            self._doubt = Doubt(config)

    def _ratio(self, pool: int, deviations: float) -> list[float]:
        """Returns the ratios of each bin's accepted nodes to the previous bin's, in a pool."""
        if (pool, deviations) not in self._ratios:
            self._ratios[pool, deviations] = self._new_ratio(pool, deviations)
        return self._ratios[pool, deviations]

    def _new_ratio(self, pool: int, deviations: float) -> list[float]:
        config, prior = self._config, self._config.prior_outcomes
        hits, before = self._pools[pool].tolist()
        confidence, group = divmod(pool, 2)
        first = min(config.prior_match * confidence, 1.0) if confidence else config.prior_chance
        least = self.bins.chains.item(int(100 * first), 0)
        if group:
            greedy, tries = self._pools[pool - 1, :, 0].tolist()
            least = (greedy + prior * least) / (tries + prior)
        density = (hits[0] + prior * least) / (before[0] + prior) / self.bins.sizes[0]
        density = max(density, config.prior_repeat if confidence else 0.0)
        deeper = self.bins.chains[min(int(100 * density + 0.5), 100), 1:].tolist()
        each = zip(hits, before, [least, *deeper], strict=True)
        ratio = [(hit + prior * usual) / (tried + prior) for hit, tried, usual in each]
        if confidence:  # deeper bins have fewer outcomes, so the previous bin is their prior
            for i in range(2, len(ratio)):
                ratio[i] = (hits[i] + prior * ratio[i - 1]) / (before[i] + prior)
        if deviations:
            for i, width in enumerate(self.bins.measures[0]):
                share = min(ratio[i] / width, 1.0)
                spread = math.sqrt(share * (1 - share) / (before[i] + prior + 1)) * width
                if deviations < 0 or before[i] < config.seen_enough:
                    ratio[i] = max(ratio[i] + deviations * spread, 0.0)
        return ratio


def _add(sums: Array, places: Sequence[int], kept: Array, new: Array) -> None:
    """Adds outcomes to sums, one after the other; each keeps a share of what its sum had before.

    Args:
        sums: [places, 2, bins].
        places: Place of each outcome.
        kept: Share that is kept, [outcomes, bins].
        new: The outcomes, [2, outcomes, bins].
    """
    different = set(places)
    if len(different) == len(places):
        sums[list(places)] = sums.take(places, 0) * kept[:, None] + new.swapaxes(0, 1)
        return
    for place in different:
        same = [i for i, one in enumerate(places) if one == place]
        left = kept.take(same[::-1], 0).cumprod(axis=0)[::-1]  # after an outcome and all later ones
        shown = new.take(same, 1)
        shown[:, :-1] *= left[1:]
        sums[place] = sums[place] * left[0] + shown.sum(axis=1)


def falling(gains: Array, widths: Array) -> Array:
    """Returns the nearest gains that do not increase per node (pool adjacent violators, by row)."""
    density = gains / widths
    for i in set((density[:, 1:] > density[:, :-1] + 1e-12).nonzero()[0].tolist()):
        blocks: list[tuple[float, float, int]] = []  # gain, nodes, bins
        for gain, width in zip(gains[i].tolist(), widths.tolist(), strict=True):
            count = 1
            while blocks and gain * blocks[-1][1] > blocks[-1][0] * width:
                before, nodes, bins = blocks.pop()
                gain, width, count = gain + before, width + nodes, count + bins
            blocks.append((gain, width, count))
        gains[i] = np.repeat([g / w for g, w, _ in blocks], [c for _, _, c in blocks]) * widths
    return gains
