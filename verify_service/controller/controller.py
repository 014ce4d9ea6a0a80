"""Chooses the draft and how much it drafts, for the most expected tokens per second.

Drafting never changes a token, so the choice may rest on any measurement. A draft is used if it is
expected to pay (`goodput.py`). A draft with few outcomes is rated a little better than it seems, as
long as the bank pays for trials (`bank.py`).
"""

from collections.abc import Collection, Sequence

from verify_service.controller.acceptance import Acceptance
from verify_service.controller.asked_first import Asking
from verify_service.controller.bank import Bank
from verify_service.controller.config import DEFAULT, ControllerConfig
from verify_service.controller.costs import CostModel
from verify_service.controller.goodput import Best, Goodput
from verify_service.controller.messages import (
    Candidates,
    DraftHistory,
    DraftKind,
    Observed,
    Offer,
    Plan,
    Wait,
)
from verify_service.controller.switching import Switching
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
        max_nodes: Number of nodes of the largest tree of any draft.
        is_padded: Whether all sequences of a step have the same number of rows.
        is_drafting: Whether each draft drafts for more than trials at present.
        has_trial: Whether a trial of each draft is running beside steps.
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
        self.max_nodes = max((kind.max_nodes for kind in drafts), default=0)
        self.is_padded = bool(drafts) and costs is not None and costs.table.is_padded
        self.is_drafting = [True] * len(drafts)
        self.has_trial = [False] * len(drafts)
        self.keeps_states = True
        # The newest plan's nodes and advantage, where the next steps may have it too.
        self._held: tuple[list[int], float] | None = None
        self._candidates: Candidates = ()
        if costs is None or not drafts:
            self._costs = None
            return
        bins = costs.table.bins(self.max_nodes, max(kind.depth for kind in drafts))
        own_prior, kinds = 0.0 if self.is_padded else config.own_prior, self.drafts
        acceptance = self._acceptance = [Acceptance(bins, config, own_prior) for _ in drafts]
        bank = self._bank = Bank(config, costs.plain(1))
        asking = self._asking = Asking(kinds, bank, costs, config)
        self._trials = Trials(kinds, self.has_trial, acceptance, bank, costs, config)
        switching = self._switching = Switching(costs, config)
        self._goodput = Goodput(costs, kinds, acceptance, asking.each, switching, config, bins)
        # Whether the self-test decides the newest plan; of the newest step that `observe` counted,
        # whether it was drafted, and whether no trial ran beside it; number of plain steps since.
        self._is_forced, self._was_drafted, self._is_clean, self._num_passed = False, False, True, 0
        # Seconds of drafted steps since the last plain one; of all steps since the newest plan; and
        # of plain ones that `observe` has yet to count.
        self._since_plain = self._unplanned = self._passed = 0.0

    def draft_everything(self) -> None:
        """Drafts whole trees from now on; only the draft of each sequence is still chosen."""
        self._is_adaptive, self._held = False, None
        self.is_drafting = [True] * len(self.drafts)

    @property
    def is_suspended(self) -> bool:
        """Whether nothing but trials is drafted, so that drafts need not be synced."""
        return self._is_adaptive and not any(self.is_drafting)

    @property
    def stays_suspended(self) -> bool:
        """Whether the next step is surely plain, so that no plan is needed."""
        if self._costs is None or not self.is_suspended:
            return False
        asks = self._bank.is_full and any(kind.is_asked_first for kind in self.drafts)
        config = self._config
        # On a CPU nothing but age changes evidence meanwhile; another text begins with a plan.
        most = config.look_seconds if self.is_padded else config.forget_seconds / config.seen_enough
        most = most if self.keeps_states else config.forget_seconds / 2
        # A full bank pays for asking for n-grams.
        return self._unplanned < most and (self.is_padded or not asks)

    # Before a step.

    def plan(self, candidates: Candidates, other_rows: int = 0, is_ahead: bool = False) -> Plan:
        """Plans what to draft for the sequences that decode in the coming step; see `TreeSizes`."""
        costs = self._costs
        self._is_forced = any(one.forced for one in candidates)
        if costs is None or self._is_forced:
            for one in candidates:
                one.history.chosen = one.first_draft
            return self._everything(self._limits(candidates))
        again = None if other_rows else self._planned(costs, candidates)
        self._candidates = candidates
        return again or self._new_plan(costs, not other_rows, is_ahead)

    def think(self) -> None:
        """Counts outcomes and renews a plan, while a step waits for its drafts."""
        costs, most = self._costs, self._config.near_steps // max(len(self._candidates), 1)
        if costs is None:
            return
        if sum(one.learn(most) for one in self._acceptance):
            self._goodput.renew(self._candidates)
        # What asking brings changes fast, but a full bank pays for it in any case.
        is_doubted = self.drafts[0].is_asked_first and not self._bank.is_full
        is_old = self._unplanned >= self._config.look_seconds or is_doubted
        if self._held is not None and is_old:
            self._new_plan(costs, may_try=True, is_ahead=False)

    def _new_plan(self, costs: CostModel, may_try: bool, is_ahead: bool) -> Plan:
        self._unplanned, self._held = 0.0, None
        candidates, batch = self._candidates, len(self._candidates)
        costs.context = sum(one.context for one in candidates)
        for acceptance, kind in zip(self._acceptance, self.drafts, strict=True):
            if not kind.is_asked_first:
                acceptance.learn()
        self._bank.set_plain_seconds(costs.plain(batch))
        if len(self.drafts) > 1:
            self._goodput.assign(candidates, float(self._bank.has_any))
        limits = self._limits(candidates)
        if not self._is_adaptive:
            chosen = {one.history.chosen for one in candidates}
            self.is_drafting = [number in chosen for number in range(len(self.drafts))]
            tried = self._trials.others(candidates) if may_try else {}
            return self._everything(limits)._replace(tried=tried)
        if not any(limits):
            return Plan([0] * batch, 1)
        asked = self._asking.pays(candidates, limits, self.is_drafting)
        best, beside = self._decide(costs, limits, asked, may_try)
        if may_try and self._is_clean:
            beside |= self._trials.others(candidates)
        nodes, rows = [0] * batch, 1
        if best is not None:
            more = costs.target(batch, best.rows) - self._bank.plain_seconds
            worth = best.added / best.rate
            is_spared = not is_ahead and self._switching.spares(worth, more, not may_try)
            # Doubted more once it is known how steps compare, so that plain ones become rare.
            is_new = self.is_padded or not costs.is_known
            least = self._config.margin if is_new else 1 + 1 / self._config.prior_outcomes
            advantage = max(best.rate * self._bank.plain_seconds / batch, least)
            if not is_spared and not self._plain_is_due(advantage):
                nodes, rows = best.nodes, best.rows
            self._hold(best.nodes, advantage, may_try)
        if any(asked.values()):
            self._hold(limits, self._asking.advantage, may_try)
            if not self._plain_is_due(self._asking.advantage):
                trio = zip(candidates, limits, nodes, strict=True)
                nodes = [most if asked.get(one.history.chosen) else num for one, most, num in trio]
        return Plan(nodes, costs.table.bucket(batch, max(rows, 1 + max(nodes))), beside)

    def _hold(self, nodes: list[int], advantage: float, may_try: bool) -> None:
        """Keeps a plan for the next steps, since planning takes time."""
        if may_try and not self.is_padded and len(self.drafts) == 1:
            self._held = nodes, advantage

    def _planned(self, costs: CostModel, candidates: Candidates) -> Plan | None:
        """Returns the newest plan, if it holds for these sequences."""
        if self._held is None or self._unplanned >= self._config.look_seconds:
            return None
        if [one.history for one in candidates] != [one.history for one in self._candidates]:
            return None
        nodes, advantage = self._held
        if self._plain_is_due(advantage):
            return Plan([0] * len(nodes), 1)
        nodes = [min(num, one.limits[0]) for one, num in zip(candidates, nodes, strict=True)]
        return Plan(nodes, costs.table.bucket(len(nodes), 1 + max(nodes)))

    def trim(self, offers: Sequence[Offer], others: int = 0) -> list[int]:
        """Returns how many nodes of each proposal to verify, empty proposals included.

        Sequences of other drafts verify `others` nodes.
        """
        if self._costs is None or not self._is_adaptive:
            return [offer.num_nodes for offer in offers]
        return self._goodput.trim(offers, others)

    def _decide(
        self, costs: CostModel, limits: Sequence[int], asked: dict[int, bool], may_try: bool
    ) -> tuple[Best | None, dict[int, list[int]]]:
        """Returns the best nodes of drafts that steps wait for, if they pay, and the sequences of a
        trial beside steps. The README has the rules.
        """
        bank, config, candidates = self._bank, self._config, self._candidates
        groups = {one.history.group for one in candidates}
        used = {one.history.chosen for one in candidates} - set(asked)
        is_start = not any(self.is_drafting[number] for number in used)
        are_beside = any(self.drafts[number].is_beside for number in used)
        # Drafts are rated a deviation better than they seem while the bank pays for it. With an
        # empty one, those that trials beside steps show must surely pay.
        rated = 1.0 if bank.has_any else config.sure * are_beside
        best = self._goodput.best(candidates, limits, rated, self._was_drafted)
        beside: dict[int, list[int]] = {}
        pays = False
        if best is not None:
            evidence = min(self._acceptance[number].evidence(groups) for number in used)
            is_known = costs.is_known and 2 * evidence >= config.seen_enough
            if not (is_start or are_beside):
                bank.lend(is_known)
            # Who leaves must read much to come back.
            stays = config.margin**-2 if is_known else 1.0
            least = (config.margin if is_start else stays) * len(candidates) / bank.plain_seconds
            if bank.is_full and not (is_known or are_beside):
                # A full bank earns nothing more: it pays for a trial that seems to lose little, and
                # for the first one in any case.
                least *= (evidence > 0) / (1 + is_start / config.prior_outcomes)
            pays = best.rate > least and (bank.has_any or is_known)
            is_frequent = self._switching.prompt_rate * bank.plain_seconds > config.busy_share
            self.keeps_states = not (is_start and not pays and is_frequent)
            reading = costs.reading(max(self.unread(candidates, best.nodes)))
            if is_start and bank.has_any and (are_beside or not bank.affords(reading)):
                # Trials run beside steps, or the bank cannot pay for the tokens that drafts read
                # first, so drafting begins only when it surely pays.
                is_open = pays or bank.affords(bank.plain_seconds / 2)  # what a trial may lose
                best = self._goodput.best(candidates, limits, config.sure, self._was_drafted)
                pays = best is not None and best.rate > least
                # A step without a trial is timed between two trials, as a measure of their cost.
                if are_beside and is_open and self._is_clean and not pays and may_try:
                    beside = self._trials.beside(candidates, used)
        for number, kind in enumerate(self.drafts):
            is_used = pays and number in used and not kind.is_asked_first
            self.is_drafting[number] = asked.get(number, is_used)
        return (best if pays else None), beside

    def _limits(self, candidates: Candidates) -> list[int]:
        """Returns the maximum number of nodes for each sequence's tree."""
        for one in candidates:
            one.history.chosen = max(one.history.chosen, 0)
        return [one.limits[one.history.chosen] for one in candidates]

    # Trials and checks.

    def _plain_is_due(self, advantage: float) -> bool:
        """Returns whether a plain step is due, to measure its present time; `advantage` is how many
        times as many tokens drafted steps bring.
        """
        if self._costs is None or not self._was_drafted:
            return False
        plain, switching = self._bank.plain_seconds, self._switching
        cost = max(advantage, self._config.margin) * plain - plain
        cost += switching.switch_seconds if switching.follows else 0.0
        return self._since_plain * self._costs.check_share > cost

    def unread(self, candidates: Candidates, nodes: Sequence[int]) -> list[int]:
        """Returns, for each draft, the number of tokens that it reads before a step beyond what a
        step commits; 0 for a draft that is asked first, which reads at next to no cost.
        """
        totals = [0] * len(self.drafts)
        for one, num in zip(candidates, nodes, strict=True):
            number = max(one.history.chosen, 0)
            behind = one.behind[number] * (not self.drafts[number].is_asked_first)
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
        """Records which of a tree's first nodes were right, and how many of these were verified:
        all where `brought` is None. Outcomes of the self-test do not count, nor, for a draft that
        steps wait for on a CPU, a text's first ones: they are worse than later ones, and show
        nothing else of texts that are left after them.
        """
        if num_nodes and self._costs is not None and not self._is_forced:
            history.num_drafted += 1
            # Two of a single text; several texts together show enough.
            counts = history.num_drafted * (1 + len(self._candidates))
            is_first = counts <= self._config.prior_outcomes
            if self.is_padded or self.drafts[draft].is_asked_first or not is_first:
                self._acceptance[draft].record(history, draft, num_nodes, accepted, confidence)
            if history.cost:
                gained = len(accepted) if brought is None else brought
                self._asking.each[draft].brought(history, gained - history.cost)
                history.cost = 0.0

    def tried(
        self, offer: Offer, draft: int, num_known: int, right: Sequence[int], batch: int
    ) -> None:
        """Records a trial's proposal, which later tokens have judged without a verification.

        The leading `num_known` nodes can be judged. A step has `batch` sequences now.
        """
        if self._costs is not None and self.drafts[draft].is_asked_first:
            brought = self._goodput.judge(offer, draft, right, batch)
            self._asking.each[draft].brought(offer.history, brought)
        if self._costs is not None and num_known:
            self._acceptance[draft].record(offer.history, draft, num_known, right, offer.confidence)

    def ended_trial(self, draft: int = 0) -> None:
        """Ends a trial beside steps, once its outcomes have been recorded."""
        self.has_trial[draft] = False
        if self.keeps_states:
            self._unplanned = self._config.forget_seconds

    def passes(self, seconds: float, lead: float = 0.0) -> bool:
        """Records a plain step briefly if nothing is to be learnt from it.

        Args:
            seconds: Seconds of the step.
            lead: Part of them before the target's part.

        Returns:
            False where the caller must call `observe` instead.
        """
        if self._costs is None or not self.is_suspended:
            return False
        if self.keeps_states:
            most = self._config.prior_outcomes - 1 if self.is_padded else self._config.near_steps
            is_due = self._num_passed >= most or any(self.has_trial)
            if is_due or self._was_drafted or (lead and self._switching.follows):
                return False
            # The next step that is observed counts them too.
            self._num_passed, self._passed = self._num_passed + 1, self._passed + seconds
        else:
            self._is_clean = True  # frequent prompts hide what trials cost
            self._switching.age_prompts(seconds)
            self._bank.record_plain(seconds)
        self._unplanned += seconds
        return True

    def observe(self, step: Observed) -> None:
        """Learns from a step's time and tokens."""
        costs = self._costs
        if costs is None:
            return
        bank, switching, batch, wait = self._bank, self._switching, step.batch, step.wait
        is_drafted = wait.levels > 0 or step.rows > costs.table.plain_rows(batch)
        switching.age_prompts(step.seconds + wait.lead + self._passed)
        is_switch = costs.table.is_padded and is_drafted != self._was_drafted
        waited = switching.observe(step, self.drafts, is_switch, any(self.has_trial))
        cost = costs.target(batch, step.rows) + waited
        self._was_drafted, self._is_clean = is_drafted, not any(self.has_trial)
        self._unplanned, plain = self._unplanned + cost, costs.plain(batch)
        passed, self._passed, self._num_passed = self._passed, 0.0, 0
        costs.pass_time(cost + passed)
        worth = step.tokens * plain / batch
        if is_drafted:
            self._since_plain += cost
            if not self._is_forced:
                is_first = all(self.drafts[n].is_asked_first for n, _ in wait.parts or [(0, wait)])
                bank.record_drafted(cost + costs.reading(wait.unread), worth, is_first)
        else:
            self._since_plain = 0.0
            # A trial runs beside the step and slows it.
            beyond = any(self.has_trial) * costs.beyond(batch, step.rows, step.seconds + wait.lead)
            bank.record_plain(cost + passed, beyond)
            switching.age_waits(cost, bank.plain_seconds)
        for acceptance, asking in zip(self._acceptance, self._asking.each, strict=True):
            acceptance.pass_time(cost + passed, (cost + passed) / plain)
            asking.pass_time(cost + passed)

    def interrupted(self, wait: Wait) -> None:
        """Records a step with prompts."""
        if self._costs is not None:
            self._switching.interrupt(wait, self.is_suspended)

    def forget(self, history: DraftHistory) -> None:
        """Drops the state of a sequence that has ended."""
        if self._costs is not None:
            self._goodput.renew(())
            if not self.is_padded:
                self._unplanned += self._config.forget_seconds / self._config.seen_enough
            for number, acceptance in enumerate(self._acceptance):
                acceptance.forget(history, number)

    def _everything(self, limits: list[int]) -> Plan:
        rows, costs = 1 + max(limits, default=0), self._costs
        return Plan(limits, rows if costs is None else costs.table.bucket(len(limits), rows))
