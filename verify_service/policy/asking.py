"""Drafts that are asked first, since asking costs next to nothing: whom to ask for, and what of a proposal to verify."""

from collections.abc import Collection, Sequence

from verify_service.policy.acceptance import Acceptance, DraftHistory
from verify_service.policy.messages import Offer, Want
from verify_service.policy.probing import Probing
from verify_service.policy.row_choice import RowChoice
from verify_service.policy.step_time import DraftTimes, GridTimes, StepTimes

START_MARGIN = 1.03  # by which drafting must be faster before it starts
ASK_MEMORY = 12  # proposals on which a sequence's worth of asking rests


class AskedFirst:
    """Learns what asking brings, for each sequence.

    Attributes:
        is_used: Whether a draft was ever asked so.
        is_trial: Whether the newest step asks only to find out.
    """

    def __init__(
        self,
        times: StepTimes,
        acceptance: Acceptance,
        draft_times: DraftTimes,
        choice: RowChoice,
        probing: Probing,
        depth: int,
    ) -> None:
        self._times = times
        self._acceptance = acceptance
        self._draft_times = draft_times
        self._choice = choice
        self._probing = probing
        self._depth = depth
        self._worth = 0.3  # of sequences that were not asked for yet
        self._is_drafting = False
        self.is_used = False
        self.is_trial = False

    def may_ask(self, wanted: Sequence[Want]) -> bool:
        """Whether asking pays, or is to be tried."""
        times, probing, batch = self._times, self._probing, len(wanted)
        rate = batch / times.seconds(batch, 1 if times.is_padded else batch)
        cost = rate * self._draft_times.steps(batch, 1) * times.unit
        worth = 0.0
        for want in wanted:
            if want.limit:
                worth += self._worth if want.history.worth is None else want.history.worth
        margin = 1.0 if self._is_drafting else START_MARGIN
        self._is_drafting = worth > margin * cost and not probing.is_stopped
        self.is_trial = not self._is_drafting and probing.may_try()
        return self._is_drafting or self.is_trial

    def trim(self, offers: Sequence[Offer]) -> tuple[list[int], int]:
        """Nodes to verify of each proposal, and rows of the longest."""
        times, batch = self._times, len(offers)
        trees = [(offer.history, offer.num_nodes, offer.confidence) for offer in offers]
        nodes, rows, plain_rows = [0] * batch, 1, 1 if times.is_padded else batch
        if isinstance(times, GridTimes):
            rows = self._trim_grid(times, trees)
            nodes = [min(offer.num_nodes, rows - 1) for offer in offers]
            extra = times.seconds(batch, rows) - times.seconds(batch, 1)
        else:
            plain = batch / times.seconds(batch, batch)
            items = self._choice.items(trees, self._probing.now)
            rate, chosen = self._choice.best(times, batch, 0, items, self._depth, is_free=True)
            if rate > plain:
                nodes = chosen
            rows = 1 + max(nodes)
            extra = times.seconds(batch, batch + sum(nodes)) - times.seconds(batch, batch)
        cost = extra * batch / times.seconds(batch, plain_rows) / max(sum(nodes), 1)
        for i, offer in enumerate(offers):
            if offer.forced:
                nodes[i] = offer.num_nodes
        for offer, num_nodes in zip(offers, nodes, strict=True):
            offer.history.cost = num_nodes * cost
            if num_nodes == 0 and offer.asked:
                self._brought(offer.history, 0.0)
        return nodes, rows

    def record(self, history: DraftHistory, brought: int) -> None:
        """Takes how many nodes of the proposal that was verified were right."""
        if history.cost:
            self._brought(history, brought - history.cost)
            history.cost = 0.0

    def tried(
        self, offer: Offer, num_known: int, right: Collection[int], batch: int
    ) -> tuple[int, int]:
        """Takes a proposal that was not verified; see `DraftPolicy.tried`."""
        times = self._times
        tree = (offer.history, offer.num_nodes, offer.confidence)
        plain = times.seconds(batch, 1 if times.is_padded else batch)
        if isinstance(times, GridTimes):
            nodes = min(self._trim_grid(times, [tree] * batch) - 1, offer.num_nodes)
            extra = (times.seconds(batch, 1 + nodes) - plain) / batch
        else:
            items = self._choice.items([tree], self._probing.now)
            rate, chosen = self._choice.best(times, batch, 0, items, self._depth, is_free=True)
            nodes = chosen[0] if rate > batch / plain else 0
            extra = times.seconds(batch, batch + nodes) - plain
        brought = sum(node < nodes for node in right)
        if num_known:
            now = self._probing.now
            self._acceptance.record(offer.history, num_known, right, offer.confidence, now)
        self._brought(offer.history, brought - extra * batch / plain)
        return nodes, brought

    def _trim_grid(self, times: GridTimes, trees: Sequence[tuple[DraftHistory, int, int]]) -> int:
        totals = [0.0] * len(self._acceptance.ladder)
        for density, _, rung in self._choice.items(trees, self._probing.now):
            totals[rung] += density * self._acceptance.ladder.widths[rung]
        batch = len(trees)
        # No smaller step than the longest proposal is of use to it; a partial rung counts as none.
        return max(
            times.rows(batch),
            key=lambda rows: (
                (batch + sum(totals[: self._acceptance.ladder.num_within(rows - 1)]))
                / times.seconds(batch, rows)
            ),
        )

    def _brought(self, history: DraftHistory, tokens: float) -> None:
        """Learns what it brought to ask for a sequence."""
        if history.worth is None:
            history.worth = self._worth
        history.worth += (tokens - history.worth) / ASK_MEMORY
        self._worth += (tokens - self._worth) / ASK_MEMORY / 4
