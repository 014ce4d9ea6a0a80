"""Finds the trees with the most tokens per second.

goodput(draft, size) = expected tokens of a step / (target's seconds + draft's seconds)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from verify_service.controller.acceptance import Acceptance, Array, SizeBins
from verify_service.controller.asked_first import AskedFirst
from verify_service.controller.config import ControllerConfig
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import Candidates, DraftKind, Offer
from verify_service.controller.switching import Switching
from verify_service.controller.tables import Choices


class Best(NamedTuple):
    """The best set of nodes for a step.

    Attributes:
        rate: Expected tokens per second.
        nodes: Number of nodes of each sequence.
        rows: Number of rows of the step, as the table counts them.
        added: Expected number of accepted nodes.
    """

    rate: float
    nodes: list[int]
    rows: int
    added: float


@dataclass
class Goodput:
    """Compares sets of nodes by the cost of the step and the tokens that they bring.

    Attributes:
        costs: Cost model.
        drafts: The drafts.
        acceptance: Acceptance of each draft.
        asking: Estimates of what asking each draft is worth.
        switching: Costs of switching between drafted and plain steps.
        config: Numbers of the policy.
        bins: Tree sizes that estimates distinguish.
    """

    costs: CostModel
    drafts: Sequence[DraftKind]
    acceptance: Sequence[Acceptance]
    asking: Sequence[AskedFirst]
    switching: Switching
    config: ControllerConfig
    bins: SizeBins
    # What is worth verifying of proposals, until outcomes are counted.
    _trimmed: dict[tuple[object, ...], tuple[list[int], float]] = field(default_factory=dict)

    def best(
        self, candidates: Candidates, limits: Sequence[int], deviations: float, was_drafted: bool
    ) -> Best | None:
        """Returns the best set of nodes of drafts that steps wait for; None without such drafts.

        Args:
            candidates: All sequences that decode.
            limits: Maximum number of nodes of each sequence.
            deviations: See `Acceptance.gains`.
            was_drafted: Whether the previous step was drafted, so that drafting does not begin now.
        """
        costs, batch, follows = self.costs, len(candidates), self.switching.follows
        gains, counts = self._gains(candidates, limits, deviations)
        if not counts:
            return None
        kinds = [(number, self.drafts[number], count) for number, count in counts.items()]
        depth = max(kind.depth for _, kind, _ in kinds)
        choices = costs.table.choices(gains, self.bins, depth, 0)
        if not len(choices.added):
            return None
        waits = dict.fromkeys(choices.levels.tolist(), 0.0)
        for level in waits:
            for number, kind, count in kinds:
                wait = costs.draft(number, count, min(int(level), kind.depth), follows)
                waits[level] = max(waits[level], wait)
        seconds = costs.targets(batch, choices.rows)
        seconds = seconds + np.array([waits[level] for level in choices.levels.tolist()])
        if any(kind.is_beside for _, kind, _ in kinds):
            seconds = self.switching.with_switches(seconds, not was_drafted)
        rates = (batch + choices.added) / seconds
        index = self._best_of(rates, choices, deviations > 0)
        nodes = [min(pair) for pair in zip(choices.nodes(index), limits, strict=True)]
        rows = int(choices.rows[index]) if costs.table.is_padded else 1 + max(nodes)
        return Best(float(rates[index]), nodes, rows, float(choices.added[index]))

    def of_drafts(self, candidates: Candidates, deviations: float) -> Array:
        """Returns tokens per second, [drafts, sequences]: the goodput if all sequences were like
        this one and had this draft.
        """
        costs, batch, bins = self.costs, len(candidates), self.bins
        values = np.zeros((len(self.drafts), batch))
        for number, kind in enumerate(self.drafts):
            if kind.is_asked_first:
                seconds = costs.plain(batch) + costs.draft(number, batch, 1)
                histories = [one.history for one in candidates]
                worth = self.asking[number].worth(histories, deviations > 0)
                values[number] = batch * (1 + np.array(worth)) / seconds
            else:
                sizes = np.array(bins.sizes[: bins.num_within(kind.max_nodes)])
                gains = self._expected(candidates, range(batch), number, deviations)
                tokens = 1 + np.cumsum(gains[:, : len(sizes)], axis=1)
                rows = 1.0 + sizes if costs.table.is_padded else batch * (1.0 + sizes)
                ahead = self.switching.follows and kind.is_beside
                levels = np.minimum(sizes, kind.depth).tolist()
                waits = [costs.draft(number, batch, level, ahead) for level in levels]
                rates = batch * tokens / (costs.targets(batch, rows) + waits)
                values[number] = rates.max(axis=1)
        return values

    def assign(self, candidates: Candidates, deviations: float) -> None:
        """Assigns each sequence the draft with the most tokens per second."""
        values = self.of_drafts(candidates, deviations)
        for i, one in enumerate(candidates):
            values[[one.limits[number] == 0 for number in range(len(values))], i] = 0.0
        best = values.argmax(axis=0).tolist()
        for i, one in enumerate(candidates):
            current = one.history.chosen
            least = self.config.margin * values[current, i] if current >= 0 else 0.0
            if values[best[i], i] > least:
                one.history.chosen = best[i]

    def of_offers(self, offers: Sequence[Offer]) -> Array:
        """Returns the expected accepted nodes of proposals that have come, [offers, bins]."""
        gains = np.zeros((len(offers), len(self.bins)))
        numbers = [max(one.history.chosen, 0) if one.num_nodes else None for one in offers]
        for number, acceptance in enumerate(self.acceptance):
            own = [i for i, other in enumerate(numbers) if other == number]
            if own:
                gains[own] = _gains_of(acceptance, number, [offers[i] for i in own])
        return self._within(gains, [offer.num_nodes for offer in offers])

    def trim(self, offers: Sequence[Offer], others: int) -> list[int]:
        """Returns how many nodes of each proposal to verify; see `Controller.trim`."""
        batch, is_padded = len(offers), self.costs.table.is_padded
        chosen, plain = self._trim(offers, 0 if is_padded else others)
        pairs = zip(offers, chosen, strict=True)
        nodes = [one.num_nodes if one.forced else min(num, one.num_nodes) for one, num in pairs]
        rows = 1 + max(nodes) if is_padded else batch + others + sum(nodes)
        cost = (self.costs.target(batch, rows) - plain) * batch / plain / max(sum(nodes), 1)
        for offer, num in zip(offers, nodes, strict=True):
            offer.history.cost = num * cost
            if num == 0 and offer.asked:
                self.asking[offer.history.chosen].brought(offer.history, 0.0)
        return nodes

    def renew(self, candidates: Candidates) -> None:
        """Forgets what is known of proposals; prepares it anew for a single sequence."""
        self._trimmed.clear()
        if len(candidates) == 1 and not self.costs.table.is_padded:
            history = candidates[0].history
            for _, confidence in history.tracks:
                self._trim([Offer(history, self.bins.sizes[-1], confidence)], 0)

    def _trim(self, offers: Sequence[Offer], others: int) -> tuple[list[int], float]:
        """Returns how many nodes of each proposal are worth verifying, which may be more than it
        has, and the target's seconds without them.
        """
        costs, batch = self.costs, len(offers)
        if batch == 1 and offers[0].num_nodes and not costs.table.is_padded:
            offers = [offers[0]._replace(num_nodes=self.bins.sizes[-1])]  # one result for all
        key = others, *((one.num_nodes, one.confidence, id(one.history)) for one in offers)
        if key not in self._trimmed:
            plain = costs.target(batch, costs.table.plain_rows(batch) + others)
            numbers = {max(one.history.chosen, 0) for one in offers if one.asked}
            wait = max((costs.draft(number, batch, 1) for number in numbers), default=0.0)
            nodes = self.worthwhile(self.of_offers(offers), batch, others, plain, wait)
            self._trimmed[key] = nodes, plain
        return self._trimmed[key]

    def worthwhile(
        self, gains: Array, batch: int, others: int, plain: float, wait: float = 0.0
    ) -> list[int]:
        """Returns the number of nodes of each proposal that are worth verifying.

        Args:
            gains: Expected accepted nodes by sequence and bin, of all or some sequences.
            batch: Number of sequences of the step.
            others: Number of rows beside theirs.
            plain: Seconds of the target without these nodes.
            wait: Seconds that the step has waited for the proposals. They are spent, but the more a
                step takes, the less is a row's time beside what its node may bring.
        """
        choices = self.costs.table.choices(gains, self.bins, self.bins.sizes[-1], others)
        if len(choices.added):
            rates = (batch + choices.added) / (self.costs.targets(batch, choices.rows) + wait)
            index = self._best_of(rates, choices)
            if rates[index] > batch / (plain + wait):
                return choices.nodes(index)
        return [0] * len(gains)

    def judge(self, offer: Offer, draft: int, right: Sequence[int], batch: int) -> float:
        """Returns the tokens that verifying a proposal would have brought, less the cost of the
        verification in tokens.
        """
        costs, is_padded = self.costs, self.costs.table.is_padded
        gains = _gains_of(self.acceptance[draft], draft, [offer])
        gains, plain = self._within(gains, [offer.num_nodes]), costs.plain(batch)
        [nodes] = self.worthwhile(gains, batch, 0 if is_padded else batch - 1, plain)
        seconds = costs.target(batch, nodes + (1 if is_padded else batch))
        return sum(node < nodes for node in right) - (seconds - plain) * batch / plain

    def _best_of(self, rates: Array, choices: Choices, may_explore: bool = True) -> int:
        """Returns the index of the choice with the highest rate; on a CPU the largest of those that
        are nearly as good, if it `may_explore`: it shows most, and chances deep in trees are learnt
        from few outcomes.
        """
        best = int(rates.argmax())
        if self.costs.table.is_padded or not may_explore:
            return best
        [near] = (self.config.margin * rates >= rates[best]).nonzero()
        return int(near[choices.added[near].argmax()])

    def _gains(
        self, candidates: Candidates, limits: Sequence[int], deviations: float
    ) -> tuple[Array, dict[int, int]]:
        """Returns the expected accepted nodes by sequence and bin, less the cost of reading, and
        the number of sequences of each draft.
        """
        batch = len(candidates)
        gains = np.zeros((batch, len(self.bins)))
        counts: dict[int, int] = {}
        for number, kind in enumerate(self.drafts):
            own = [i for i in range(batch) if limits[i] and candidates[i].history.chosen == number]
            if own and not kind.is_asked_first:
                counts[number] = len(own)
                gains[own] = self._expected(candidates, own, number, deviations)
        return self._within(gains, limits), counts

    def _expected(
        self, candidates: Candidates, own: Sequence[int], number: int, deviations: float
    ) -> Array:
        """Returns the expected accepted nodes of a draft for some sequences, by sequence and bin.

        The cost of the tokens that it must read first is subtracted, spread over the steps that the
        sequences may still have.
        """
        acceptance, costs = self.acceptance[number], self.costs
        tracks = [acceptance.track(candidates[i].history, number, 0) for i in own]
        pools = [acceptance.pool(candidates[i].history, 0) for i in own]
        gains = acceptance.gains(tracks, pools, deviations)
        behind = np.array([candidates[i].behind[number] for i in own])
        if behind.max() > self.config.close_tokens:
            left = np.array([candidates[i].left for i in own]) / (1 + gains.sum(axis=1))
            token = costs.reading(1) * len(candidates) / costs.plain(len(candidates))
            burden = np.where(behind > self.config.close_tokens, token * behind, 0.0)
            burden = burden / np.clip(left, 1, self.config.payback_steps)
            gains = np.maximum(np.cumsum(gains, axis=1) - burden[:, None], 0.0)
            gains[:, 1:] -= gains[:, :-1].copy()  # taken from the likeliest nodes first
        return gains

    def _within(self, gains: Array, limits: Sequence[int]) -> Array:
        """Returns gains with zeros for bins beyond each sequence's limit."""
        return gains * self.bins.within.take(limits, 0, mode="clip")


def _gains_of(acceptance: Acceptance, number: int, offers: Sequence[Offer]) -> Array:
    """Returns the expected accepted nodes of a draft's proposals, by proposal and bin."""
    tracks = [acceptance.track(one.history, number, one.confidence) for one in offers]
    pools = [acceptance.pool(one.history, one.confidence) for one in offers]
    return acceptance.gains(tracks, pools)
