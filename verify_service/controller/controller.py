"""Chooses the draft and how much it drafts, for the most expected tokens per second.

    goodput(draft, size) = expected tokens of a step / (target's seconds + draft's seconds)

Drafting never changes a token, so the choice may rest on any measurement. A draft is used if it is
expected to pay. A draft with few outcomes is rated a little better than it seems, for as long as
the bank pays for trials (`bank.py`).
"""

from collections.abc import Collection, Sequence

from verify_service.controller.acceptance import Acceptance
from verify_service.controller.asked_first import Asking
from verify_service.controller.bank import Bank
from verify_service.controller.changes import Changes
from verify_service.controller.config import DEFAULT, ControllerConfig
from verify_service.controller.costs import CostModel
from verify_service.controller.goodput import Best, Goodput
from verify_service.controller.messages import (
    NO_TRIALS,
    Candidates,
    DraftHistory,
    DraftKind,
    Observed,
    Offer,
    Plan,
    Wait,
    first_draft,
)
from verify_service.controller.trials import Trials


class Controller:
    """Plans the drafting of each step. Belongs to the engine's thread.

    Args:
        costs: Cost model of steps; None drafts everything.
        drafts: The drafts, in the order of preference while nothing is known.
        is_adaptive: Whether sizes are chosen; else only the draft of each sequence is.
        config: Numbers of the policy.

    Attributes:
        drafts: The drafts, as the controller knows them.
        is_drafting: For each draft, whether it drafts for more than trials at present.
        has_trial: For each draft, whether a trial beside steps is running.
        keeps_states: Whether hidden states are kept for suspended drafts; they are not while very
            many prompts come.
    """

    def __init__(
        self,
        costs: CostModel | None,
        drafts: Sequence[DraftKind],
        is_adaptive: bool = True,
        config: ControllerConfig = DEFAULT,
    ) -> None:
        self._costs = costs
        self._config = config
        self._is_adaptive = is_adaptive and costs is not None
        self.drafts = list(drafts)
        self.is_drafting = [True] * len(drafts)
        self.has_trial = [False] * len(drafts)
        self.keeps_states = True
        if costs is None or not drafts:
            self._costs = None
            return
        bins = costs.table.bins(self.max_nodes, max(kind.depth for kind in drafts))
        self._acceptance = [Acceptance(bins, config) for _ in drafts]
        self._bank = Bank(config, costs.plain(1))
        self._asking = Asking(self.drafts, self._bank, costs, config)
        self._trials = Trials(
            self.drafts, self.has_trial, self._acceptance, self._bank, costs, config
        )
        self._changes = Changes(costs, config)
        self._goodput = Goodput(
            costs, self.drafts, self._acceptance, self._asking.each, self._changes, config
        )
        self._is_forced = self._was_drafted = False
        self._since_plain = 0.0  # seconds of steps with drafts since the last one without
        self._unplanned = 0.0  # seconds since a plan was made, while nothing is drafted

    def draft_everything(self) -> None:
        """Drafts whole trees from now on; only the draft of each sequence is still chosen."""
        self._is_adaptive = False
        self.is_drafting = [True] * len(self.drafts)

    @property
    def is_padded(self) -> bool:
        """Whether all sequences of a step have the same number of rows."""
        return self._costs is not None and self._costs.table.is_padded

    @property
    def max_nodes(self) -> int:
        """Number of nodes of the largest tree of any draft."""
        return max((kind.max_nodes for kind in self.drafts), default=0)

    @property
    def is_suspended(self) -> bool:
        """Whether nothing but trials is drafted, so that drafts need not be synced."""
        return self._is_adaptive and not any(self.is_drafting)

    @property
    def stays_suspended(self) -> bool:
        """Whether the next step is surely plain, so that no plan is needed."""
        if self._costs is None or not self.is_suspended:
            return False
        # A full bank pays for asking for n-grams, and any step may find a match.
        asks = self._bank.is_full and any(kind.is_asked_first for kind in self.drafts)
        most = self._config.look_seconds if self.keeps_states else self._config.busy_seconds
        return self._unplanned < most and (self.is_padded or not asks)

    # Before a step.

    def plan(self, candidates: Candidates, other_rows: int = 0, is_ahead: bool = False) -> Plan:
        """Plans what to draft in the coming step.

        Args:
            candidates: All sequences that decode.
            other_rows: Number of rows of prompts in the same step.
            is_ahead: Whether the step is started before the running one is done.
        """
        costs = self._costs
        self._is_forced = any(one.forced for one in candidates)
        if costs is None or self._is_forced:
            for one in candidates:
                one.history.chosen = first_draft(one, len(self.drafts))
            return self._everything(self._limits(candidates))
        costs.context = sum(one.context for one in candidates)
        self._unplanned = 0.0
        batch = len(candidates)
        self._bank.look(costs.plain(batch))
        if len(self.drafts) > 1:
            self._goodput.assign(candidates, self._deviations)
        limits = self._limits(candidates)
        may_try = not other_rows
        if not self._is_adaptive:
            chosen = {one.history.chosen for one in candidates}
            self.is_drafting = [number in chosen for number in range(len(self.drafts))]
            tried = self._trials.others(candidates) if may_try else NO_TRIALS
            return self._everything(limits)._replace(tried=tried)
        if not any(limits):
            return Plan([0] * batch, 1)
        asked = self._asking.pays(candidates, limits, self.is_drafting)
        best, beside = self._decide(costs, candidates, limits, asked, may_try)
        if may_try:
            beside |= self._trials.others(candidates)
        nodes, rows = [0] * batch, 1
        if best is not None and self._pays:
            more = costs.target(batch, best.rows) - self._bank.step
            bring = best.added / best.rate
            is_spared = not is_ahead and self._changes.spares(bring, more, not may_try)
            if not is_spared and not self._must_check(batch, best.rate * self._bank.step / batch):
                nodes, rows = best.nodes, best.rows
        elif best is not None and may_try:
            found = self._trials.probed(candidates, limits)
            nodes, rows = (nodes, 1) if found is None else (found, 2)
        if any(asked.values()) and not self._must_check(
            batch, self._asking.advantage(candidates, asked)
        ):
            for i, one in enumerate(candidates):
                if asked.get(one.history.chosen):
                    nodes[i] = limits[i]
        return Plan(nodes, costs.table.bucket(batch, max(rows, 1 + max(nodes))), beside)

    def trim(self, offers: Sequence[Offer], others: int = 0) -> list[int]:
        """Returns how many nodes of each proposal to verify.

        Args:
            offers: Proposals of the step, empty ones included.
            others: Number of nodes that sequences of other drafts verify.
        """
        costs = self._costs
        nodes = [offer.num_nodes for offer in offers]
        if costs is None or not self._is_adaptive:
            return nodes
        batch = len(offers)
        gains = self._goodput.of_offers(offers)
        beside = 0 if costs.table.is_padded else others
        plain = costs.target(batch, costs.table.plain_rows(batch) + beside)
        chosen, seconds = self._goodput.worthwhile(gains, batch, beside, plain)
        nodes = [
            offer.num_nodes if offer.forced else min(num, offer.num_nodes)
            for offer, num in zip(offers, chosen, strict=True)
        ]
        cost = (seconds - plain) * batch / plain / max(sum(nodes), 1)
        for offer, num in zip(offers, nodes, strict=True):
            offer.history.cost = num * cost
            if num == 0 and offer.asked:
                self._asking.each[offer.history.chosen].brought(offer.history, 0.0)
        return nodes

    def _decide(
        self,
        costs: CostModel,
        candidates: Candidates,
        limits: Sequence[int],
        asked: dict[int, bool],
        may_try: bool,
    ) -> tuple[Best | None, dict[int, list[int]]]:
        """Returns the best set of nodes of drafts that steps wait for, and the sequences of a trial
        beside steps. Sets `_pays`: whether the set pays.
        """
        bank, config, batch = self._bank, self._config, len(candidates)
        used = {one.history.chosen for one in candidates} - set(asked)
        is_start = not any(self.is_drafting[number] for number in used)
        best = self._goodput.best(candidates, limits, self._deviations, self._was_drafted)
        beside: dict[int, list[int]] = {}
        self._pays = False
        if best is not None:
            least = (config.margin if is_start else 1.0) * batch / bank.step
            self._pays = best.rate > least and not bank.is_stopped
            is_frequent = self._changes.interrupted * bank.step > config.busy_share
            self.keeps_states = not (is_start and not self._pays and is_frequent)
            are_beside = any(self.drafts[number].is_beside for number in used)
            reading = costs.reading(max(self.unread(candidates, best.nodes)))
            if is_start and bank.has_any and (are_beside or not bank.affords(reading)):
                # Trials run beside steps, or the bank cannot pay for the tokens that drafts read
                # first, so drafting begins only when it surely pays.
                is_open = self._pays or bank.has_trial_steps
                best = self._goodput.best(candidates, limits, config.sure, self._was_drafted)
                self._pays = best is not None and best.rate > least
                if are_beside and is_open and not self._pays and may_try:
                    beside = self._trials.beside(candidates, used)
        for number, kind in enumerate(self.drafts):
            pays = self._pays and number in used and not kind.is_asked_first
            self.is_drafting[number] = asked.get(number, pays)
        return best, beside

    def _limits(self, candidates: Candidates) -> list[int]:
        """Returns the maximum number of nodes for each sequence's tree."""
        for one in candidates:
            one.history.chosen = max(one.history.chosen, 0)
        return [one.limit_of(one.history.chosen) for one in candidates]

    # Trials and checks.

    @property
    def _deviations(self) -> float:
        """Number of standard deviations that estimates of drafts are raised by."""
        return 1.0 if self._bank.has_any else self._config.sure

    def _must_check(self, batch: int, advantage: float) -> bool:
        """Returns whether a plain step is due, to measure its present time.

        Args:
            advantage: Tokens of drafted steps divided by tokens of plain steps in the same time.
        """
        if self._costs is None or not self._was_drafted:
            return False
        cost = max(advantage - 1, self._config.margin - 1) * self._bank.step
        cost += self._changes.seconds if self._changes.follows else 0.0
        return self._since_plain * self._costs.check_share > cost

    def unread(self, candidates: Candidates, nodes: Sequence[int]) -> list[int]:
        """Returns, for each draft, the number of tokens that it reads before a step beyond what a
        step commits; 0 for a draft that is asked first, which reads at next to no cost.
        """
        totals = [0] * len(self.drafts)
        for one, num in zip(candidates, nodes, strict=True):
            number = max(one.history.chosen, 0)
            behind = one.behind_of(number) * (not self.drafts[number].is_asked_first)
            if num and behind > self._config.close_tokens:
                totals[number] += behind
        return totals

    # After a step.

    def record(
        self,
        history: DraftHistory,
        num_nodes: int,
        accepted: Collection[int],
        confidence: int = 0,
        brought: int | None = None,
        draft: int = 0,
    ) -> None:
        """Records the outcome of a tree's first `num_nodes` nodes, unless it is the self-test's.

        Args:
            accepted: Nodes that were right.
            brought: Number of right nodes that were verified; None for all.
        """
        if num_nodes and self._costs is not None and not self._is_forced:
            self._acceptance[draft].record(history, draft, num_nodes, accepted, confidence)
            if history.cost:
                gained = len(accepted) if brought is None else brought
                self._asking.each[draft].brought(history, gained - history.cost)
                history.cost = 0.0

    def tried(
        self, offer: Offer, draft: int, num_known: int, right: Sequence[int], batch: int
    ) -> None:
        """Records a trial's proposal, which later tokens have judged without a verification.

        Args:
            num_known: Number of leading nodes that can be judged.
            right: Nodes that were right.
            batch: Number of sequences of a step now.
        """
        if self._costs is None:
            return
        history, acceptance = offer.history, self._acceptance[draft]
        if self.drafts[draft].is_asked_first:
            brought = self._goodput.judge(offer, draft, right, batch)
            self._asking.each[draft].brought(history, brought)
        if num_known:
            acceptance.record(history, draft, num_known, right, offer.confidence)

    def ended_trial(self, draft: int = 0) -> None:
        """Ends a trial beside steps, once its outcomes have been recorded."""
        self.has_trial[draft] = False
        if self.keeps_states:
            self._unplanned = self._config.look_seconds

    def passes(self, seconds: float) -> bool:
        """Records a plain step briefly if nothing is to be learnt from it.

        Returns False where the caller must call `observe` instead.
        """
        if self.keeps_states or self._costs is None or not self.is_suspended:
            return False
        self._unplanned += seconds
        self._changes.passed(seconds)
        self._bank.plain(seconds, True)
        return True

    def observe(self, step: Observed) -> None:
        """Learns from a step's time and tokens."""
        costs = self._costs
        if costs is None:
            return
        bank, changes, batch, wait = self._bank, self._changes, step.batch, step.wait
        is_drafted = wait.levels > 0 or step.rows > costs.table.plain_rows(batch)
        changes.passed(step.seconds + wait.lead)
        cost = costs.target(batch, step.rows) + self._learn(costs, step, is_drafted)
        self._was_drafted = is_drafted
        costs.pass_time(cost)
        plain = costs.plain(batch)
        if is_drafted:
            self._since_plain += cost
            if not self._is_forced:
                bank.invest(costs.reading(wait.unread))
                is_first = all(self.drafts[n].is_asked_first for n, _ in wait.parts or [(0, wait)])
                bank.drafted(cost, plain, step.tokens * plain / batch, is_first)
        else:
            self._since_plain = 0.0
            self._unplanned += cost
            beyond = 0.0
            if any(self.has_trial):  # a trial runs beside the step and slows it
                beyond = costs.beyond(batch, step.rows, step.seconds + wait.lead)
            bank.plain(cost, self.is_suspended, beyond)
            changes.suspended(cost, bank.step)
        for acceptance, asking in zip(self._acceptance, self._asking.each, strict=True):
            acceptance.pass_time(cost)
            asking.pass_time(cost)

    def _learn(self, costs: CostModel, step: Observed, is_drafted: bool) -> float:
        """Learns the time of a step and its drafts; returns the seconds that such drafts take."""
        changes, wait = self._changes, step.wait
        is_changed = costs.table.is_padded and is_drafted != self._was_drafted
        parts = wait.parts or (((0, wait),) if wait.levels else ())
        if wait.seconds is None:  # the draft's time is in the step's own
            changes.followed()
            [(number, part)] = parts
            levels = min(part.levels, step.rows - 1)
            if not is_changed:
                costs.waited_within(number, part.sequences, levels, step.rows, step.seconds)
            return costs.draft(number, part.sequences, levels, True)
        changes.waited(wait)
        is_alone = changes.follows and wait.lead > 0
        is_unusual = costs.table.is_padded and (is_changed or any(self.has_trial) or is_alone)
        costs.observe(step.batch, step.rows, step.seconds, not is_unusual)
        for number, part in parts:
            is_first = self.drafts[number].is_asked_first
            if is_first or not (is_changed or is_alone):
                most = 2 * costs.draft(number, part.sequences, part.levels) + costs.table.unit / 10
                seconds = min(part.seconds or 0.0, most if is_first else 1e9)  # no hiccups
                costs.waited(number, part.sequences, part.levels, seconds, unread=part.unread)
        if is_alone and is_drafted:
            self._bank.invest(changes.seconds)
        waits = (costs.draft(n, part.sequences, part.levels, is_alone) for n, part in parts)
        return max(waits, default=0.0)

    def interrupted(self, wait: Wait) -> None:
        """Records a step with prompts."""
        if self._costs is not None:
            self._changes.interrupted += 1.0
            self._changes.learn(wait)

    def forget(self, history: DraftHistory) -> None:
        """Drops the state of a sequence that has ended."""
        if self._costs is not None:
            for number, acceptance in enumerate(self._acceptance):
                acceptance.forget(history, number)

    def _everything(self, limits: list[int]) -> Plan:
        rows, costs = 1 + max(limits, default=0), self._costs
        return Plan(limits, rows if costs is None else costs.table.bucket(len(limits), rows))
