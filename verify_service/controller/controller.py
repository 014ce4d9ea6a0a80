"""How much to draft and by which draft: the most expected tokens per second, by what steps cost and drafts bring.

    goodput(draft, size) = expected tokens of a step / (target's seconds + draft's seconds)

What is drafted never changes a token, so any measurement may be used. Drafting that is expected to pay is done; what is not known well
is taken to be a little better than it seemed, for as long as a bank of seconds pays for finding out. The bank pays whatever drafted
steps lose against plain ones, so that no mistake costs more than it holds; when it is empty, nothing is drafted for a while.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from verify_service.controller.acceptance import Acceptance, Array
from verify_service.controller.config import DEFAULT, ControllerConfig
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import DraftHistory, Observed, Offer, Plan, Wait, Want

CLOSE = 32  # tokens that a draft reads on the side
# Sequences that are drafted for at a time to find out: in a step, and beside steps, where their draft may read so many tokens first.
PROBED, TRIED, TRIED_TOKENS = 4, 16, 2000
TRIAL_COST = 0.2  # of what a trial beside steps takes the draft, that it takes of the steps
LOOK_SECONDS = (
    0.04  # for which nothing is considered anew where steps run ahead and nothing is drafted
)
LEAST_LEFT = 0.1  # of the time that decoding is left with at least, as far as prompts are believed to interrupt it
WAITING = 2.0  # steps that the host begins for every one with prompts
WAITED_STEPS = 8  # with drafts, one after the other, after which nobody is expected to follow on the device any more
UNCOMPARED = 4  # times as many plain steps are due while little is known of the difference
FREQUENT = 1 / 16  # of plain steps that have prompts, from which a draft that rests hears nothing


class DraftKind(NamedTuple):
    """What the controller must know of a draft.

    Attributes:
        max_nodes: Nodes of its largest tree.
        depth: Levels of its largest tree.
        is_asked_first: Asking costs so little that what is worth verifying is decided by the proposal.
        is_beside: It is asked beside steps to find out, since steps follow one another on the device.
    """

    max_nodes: int
    depth: int
    is_asked_first: bool = False
    is_beside: bool = False


class _Best(NamedTuple):
    """A set of nodes: tokens per second, nodes of each sequence, rows of the step, expected accepted nodes."""

    rate: float
    nodes: list[int]
    rows: int
    added: float


class Controller:
    """Belongs to the engine's thread.

    Args:
        costs: What steps take; None drafts everything.
        drafts: What drafts there are, in the order of preference while nothing is known.
        is_adaptive: Whether it chooses sizes; else only which draft drafts for a sequence.

    Attributes:
        drafts: As given.
        is_drafting: By draft, whether something else than trials is drafted at present.
        has_trial: By draft, whether a trial beside steps is under way.
        is_deaf: Whether a draft that rests need hear nothing for now, since very many prompts come.
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
        self.is_deaf = False
        if costs is None:
            return
        ladder = costs.table.ladder(self.max_nodes)
        self._acceptance = [Acceptance(ladder, config) for _ in drafts]
        self._worth = [config.prior_worth] * len(drafts)
        self._num_worth = [0.0] * len(drafts)
        self._step = costs.plain(1)  # seconds of a plain step of as many sequences as now
        self._bank = config.bank_steps  # in such steps
        self._is_suspended = self._is_forced = False
        self._stake = (
            0.0  # seconds that the newest step with drafts would have lost with nothing accepted
        )
        self._since_plain = 0.0  # seconds of steps with drafts since the last one without
        self._was_drafted = False
        self._interrupted = 0.0  # steps with prompts a second, lately
        # Seconds before the target's part where the host begins, without drafts and with.
        self._leads = [0.0, config.switch_steps * costs.plain(1)]
        self._follows = False  # whether drafts were followed on the device
        self._is_spared = False  # the newest step that the host began decoded plainly, lest it wait
        self._num_waited = 0  # steps with drafts that were waited for, since the last that was not
        self._rested = 0.0  # seconds since a plan was made, while nothing is drafted

    def draft_everything(self) -> None:
        """From now on it chooses drafts only, not sizes."""
        self._is_adaptive = False
        self.is_drafting = [True] * len(self.drafts)

    @property
    def is_padded(self) -> bool:
        """Whether all sequences of a step have the same number of rows."""
        return self._costs is not None and self._costs.table.is_padded

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest tree of any draft."""
        return max((kind.max_nodes for kind in self.drafts), default=0)

    @property
    def is_resting(self) -> bool:
        """Whether nothing but trials is drafted, so that drafts need not read along."""
        return self._is_adaptive and not any(self.is_drafting)

    @property
    def rests_on(self) -> bool:
        """Whether the next plan is one without drafts surely, so that it need not be asked for."""
        if self._costs is None or not self.is_padded or not self.is_resting:
            return False
        return self._rested < LOOK_SECONDS

    # Before a step.

    def plan(self, wanted: Sequence[Want], other_rows: int = 0, is_ahead: bool = False) -> Plan:
        """What to draft in the coming step.

        Args:
            wanted: All sequences that decode.
            other_rows: Rows of prompts in the same step.
            is_ahead: The step is to be started behind one under way.
        """
        costs = self._costs
        self._is_forced = any(want.forced for want in wanted)
        if costs is None or self._is_forced:
            for want in wanted:
                want.history.chosen = max(self._first(want), 0)
            return self._everything([self._limit(want) for want in wanted])
        costs.context = sum(want.context for want in wanted)
        self._rested = 0.0
        batch, margin = len(wanted), self._config.margin
        self._step = costs.plain(batch)
        self._resume()
        plain = batch / self._step
        if len(self.drafts) > 1:
            self._assign(wanted, plain)
        limits = [self._limit(want) for want in wanted]
        if not self._is_adaptive:
            chosen = {want.history.chosen for want in wanted}
            self.is_drafting = [number in chosen for number in range(len(self.drafts))]
            tried = self._try_others(wanted) if len(self.drafts) > 1 and not other_rows else {}
            return self._everything(limits)._replace(tried=tried)
        if not any(limits):
            return Plan([0] * batch, 1)
        was_drafting = [
            any(self.is_drafting) and self.is_drafting[number] for number in range(len(self.drafts))
        ]
        asked, tried = self._ask(wanted, limits, plain), {}
        best = self._best(wanted, limits, self._has_bank)
        pays = False
        if best is not None:
            used = {want.history.chosen for want in wanted} - set(asked)
            is_start = not any(was_drafting[number] for number in used)
            least = (margin if is_start else 1.0) * plain
            pays = best.rate > least and not self._is_suspended
            is_frequent = self._interrupted * costs.plain(batch) > FREQUENT
            self.is_deaf = is_start and not pays and is_frequent
            if is_start and self._has_bank and self._is_beside(used):
                sure = self._best(wanted, limits, False)
                assert sure is not None
                is_open = pays or self._is_full
                pays, best = sure.rate > least, sure
                if is_open and not pays and not other_rows:
                    tried = self._try(wanted, used)
        for number in range(len(self.drafts)):
            has_any = any(want.history.chosen == number for want in wanted)
            is_asked = number in asked and asked[number]
            self.is_drafting[number] = has_any and (
                is_asked if self.drafts[number].is_asked_first else pays
            )
        if len(self.drafts) > 1 and not other_rows:
            tried = {**tried, **self._try_others(wanted)}
        nodes, rows = [0] * batch, 1
        if best is not None and pays:
            is_spared = not is_ahead and self._spares(batch, best, other_rows > 0)
            if not is_spared and not self._must_check(batch, best.rate / plain):
                nodes, rows = best.nodes, best.rows
        elif (
            best is not None
            and not other_rows
            and not self._is_suspended
            and self._affords(self._probe_loss(batch))
            and not self._is_beside(range(len(self.drafts)))
        ):
            nodes, rows = self._probe(wanted, limits), 2
        if any(asked.values()) and not self._must_check(batch, self._advantage(wanted, asked)):
            for i, want in enumerate(wanted):
                if asked.get(want.history.chosen):
                    nodes[i] = limits[i]
        return Plan(nodes, self._bucket(batch, max(rows, 1 + max(nodes))), tried)

    def trim(self, offers: Sequence[Offer], others: int = 0) -> list[int]:
        """What to verify of the proposals of a step, those that are empty included.

        Args:
            others: Nodes that sequences of other drafts verify.
        """
        costs = self._costs
        nodes = [offer.num_nodes for offer in offers]
        if costs is None or not self._is_adaptive:
            return nodes
        batch = len(offers)
        gains = self._offered(offers)
        rows = costs.table.plain_rows(batch)
        beside = 0 if costs.table.is_padded else others
        plain = costs.target(batch, rows + beside)
        chosen, seconds = self._worthwhile(gains, batch, beside, plain)
        nodes = [
            offer.num_nodes if offer.forced else min(num, offer.num_nodes)
            for offer, num in zip(offers, chosen, strict=True)
        ]
        cost = (seconds - plain) * batch / plain / max(sum(nodes), 1)
        for offer, num in zip(offers, nodes, strict=True):
            offer.history.cost = num * cost
            if num == 0 and offer.asked:
                self._brought(offer.history, offer.history.chosen, 0.0)
        return nodes

    def _best(
        self, wanted: Sequence[Want], limits: Sequence[int], is_optimistic: bool
    ) -> _Best | None:
        """The best set of nodes of drafts that are waited for; None where there are none."""
        assert self._costs is not None
        costs, config, batch = self._costs, self._config, len(wanted)
        gains, counts = self._gains(wanted, limits, is_optimistic)
        if not counts:
            return None
        kinds = [(number, self.drafts[number], count) for number, count in counts.items()]
        depth = max(kind.depth for _, kind, _ in kinds)
        choices = costs.table.choices(gains, self._acceptance[0].ladder, depth, 0)
        if not len(choices.added):
            return None
        waits = {
            level: max(
                costs.draft(number, count, min(int(level), kind.depth), self._follows)
                for number, kind, count in kinds
            )
            for level in set(choices.levels)
        }
        seconds = costs.targets(batch, choices.rows)
        seconds = seconds + np.array([waits[level] for level in choices.levels])
        if self._is_beside(counts):
            change = max(self._leads[1] - self._leads[0], 0.0)
            if not self._was_drafted:
                seconds = seconds + change / config.payback_steps
            seconds = seconds / max(1 - WAITING * change * self._interrupted, LEAST_LEFT)
        rates = (batch + choices.added) / seconds
        index = int(np.argmax(rates))
        nodes = [min(pair) for pair in zip(choices.nodes(index), limits, strict=True)]
        rows = int(choices.rows[index]) if costs.table.is_padded else 1 + max(nodes)
        return _Best(float(rates[index]), nodes, rows, float(choices.added[index]))

    def _gains(
        self, wanted: Sequence[Want], limits: Sequence[int], is_optimistic: bool
    ) -> tuple[Array, dict[int, int]]:
        """Expected accepted nodes, less what reading costs, by sequence and bin; and how many sequences each draft has."""
        assert self._costs is not None
        ladder, batch = self._acceptance[0].ladder, len(wanted)
        gains = np.zeros((batch, len(ladder)))
        counts: dict[int, int] = {}
        plain = batch / self._costs.plain(batch)
        for number, kind in enumerate(self.drafts):
            own = [i for i in range(batch) if limits[i] and wanted[i].history.chosen == number]
            if not own or kind.is_asked_first:
                continue
            counts[number] = len(own)
            gains[own] = self._expected(wanted, own, number, is_optimistic, plain)
        within = np.array([ladder.num_within(limit) for limit in limits])
        return np.where(np.arange(len(ladder)) < within[:, None], gains, 0.0), counts

    def _expected(
        self,
        wanted: Sequence[Want],
        own: Sequence[int],
        number: int,
        is_optimistic: bool,
        plain: float,
    ) -> Array:
        """What a draft brings sequences, less what it has to read first, spread over the steps that they may yet have."""
        assert self._costs is not None
        acceptance = self._acceptance[number]
        rows = [acceptance.row(wanted[i].history, number, 0) for i in own]
        pools = [acceptance.pool(wanted[i].history, 0) for i in own]
        gains = acceptance.gains(rows, pools, is_optimistic)
        behind = np.array([_of(wanted[i].behinds, number, wanted[i].behind) for i in own])
        if (behind > CLOSE).any():
            left = np.array([wanted[i].left for i in own])
            token = self._config.read_share * self._costs.table.row * plain
            burden = np.where(behind > CLOSE, token * behind, 0.0)
            burden = burden / np.clip(left, 1, self._config.payback_steps)
            gains = np.where((gains.sum(axis=1) > burden)[:, None], gains, 0.0)
            for i in range(gains.shape[1]):  # taken off the likeliest nodes
                taken = np.minimum(gains[:, i], burden)
                gains[:, i] -= taken
                burden -= taken
        return gains

    # Drafts that are asked first.

    def _ask(self, wanted: Sequence[Want], limits: Sequence[int], plain: float) -> dict[int, bool]:
        """By draft that is asked first and has sequences, whether it is asked."""
        assert self._costs is not None
        asked: dict[int, bool] = {}
        for number, kind in enumerate(self.drafts):
            if not kind.is_asked_first:
                continue
            own = [
                want
                for want, limit in zip(wanted, limits, strict=True)
                if limit and want.history.chosen == number
            ]
            if not own:
                continue
            cost = plain * self._costs.draft(number, len(own), 1)
            worth = sum(self._own_worth(want.history, number) for want in own)
            margin = 1.0 if self.is_drafting[number] else self._config.margin
            pays = worth > margin * cost and not self._is_suspended
            asked[number] = pays or self._is_full
        return asked

    def _advantage(self, wanted: Sequence[Want], asked: Mapping[int, bool]) -> float:
        """Tokens of a step with drafts that are asked first, of those of a plain one in the same time."""
        histories = [want.history for want in wanted if asked.get(want.history.chosen)]
        worth = sum(self._own_worth(history, history.chosen) for history in histories)
        return 1 + worth / len(wanted)

    def _own_worth(self, history: DraftHistory, number: int) -> float:
        config, worth = self._config, self._worth[number]
        if self._num_worth[number] < config.seen_enough and self._has_bank:
            worth = max(worth, config.prior_worth)
        total, count = history.asked.get(number, (0.0, 0.0))
        return (config.own_outcomes * worth + total) / (config.own_outcomes + count)

    def _brought(self, history: DraftHistory, number: int, tokens: float) -> None:
        """Learns what it brought to ask for a sequence."""
        config = self._config
        total, count = history.asked.get(number, (0.0, 0.0))
        kept = 1 - 2 / config.own_memory
        history.asked[number] = kept * total + tokens, kept * count + 1
        self._num_worth[number] = min(self._num_worth[number] + 1, config.pool_memory)
        weight = 1 / max(min(self._num_worth[number], config.own_memory), config.own_outcomes)
        self._worth[number] += (tokens - self._worth[number]) * weight

    def _offered(self, offers: Sequence[Offer]) -> Array:
        """Expected accepted nodes of proposals, by bin."""
        ladder = self._acceptance[0].ladder
        gains = np.zeros((len(offers), len(ladder)))
        for number, acceptance in enumerate(self._acceptance):
            own = [
                i
                for i, offer in enumerate(offers)
                if offer.num_nodes and max(offer.history.chosen, 0) == number
            ]
            if own:
                found = [offers[i] for i in own]
                rows = [acceptance.row(one.history, number, one.confidence) for one in found]
                pools = [acceptance.pool(one.history, one.confidence) for one in found]
                gains[own] = acceptance.gains(rows, pools)
        within = np.array([ladder.num_within(offer.num_nodes) for offer in offers])
        return np.where(np.arange(len(ladder)) < within[:, None], gains, 0.0)

    def _worthwhile(
        self, gains: Array, batch: int, others: int, plain: float
    ) -> tuple[list[int], float]:
        """The nodes of proposals that are worth verifying, and the step's seconds with them.

        Args:
            gains: Of all sequences, or of some.
            others: Rows beside theirs.
            plain: Seconds of the step without them.
        """
        assert self._costs is not None
        ladder = self._acceptance[0].ladder
        choices = self._costs.table.choices(gains, ladder, 1 << 20, others)
        if len(choices.added):
            seconds = self._costs.targets(batch, choices.rows)
            rates = (batch + choices.added) / seconds
            index = int(np.argmax(rates))
            if rates[index] > batch / plain:
                return choices.nodes(index), float(seconds[index])
        return [0] * len(gains), plain

    # Which draft.

    def _assign(self, wanted: Sequence[Want], plain: float) -> None:
        """Gives each sequence the draft with the most tokens per second."""
        values = self._values(wanted, plain)
        for number, of_draft in enumerate(values):
            has_it = [_of(want.limits, number, want.limit) > 0 for want in wanted]
            values[number] = np.where(has_it, of_draft, 0.0)
        best = values.argmax(axis=0).tolist()
        for i, want in enumerate(wanted):
            current = want.history.chosen
            least = self._config.margin * values[current, i] if current >= 0 else 0.0
            if values[best[i], i] > least:
                want.history.chosen = best[i]
            want.history.chosen = max(want.history.chosen, 0)

    def _values(self, wanted: Sequence[Want], plain: float) -> Array:
        """Tokens per second by draft and sequence, if all sequences were like it and had that draft."""
        assert self._costs is not None
        costs, batch, ladder = self._costs, len(wanted), self._acceptance[0].ladder
        values = np.zeros((len(self.drafts), batch))
        everyone = range(batch)
        for number, kind in enumerate(self.drafts):
            if kind.is_asked_first:
                seconds = costs.plain(batch) + costs.draft(number, batch, 1)
                worth = np.array([self._own_worth(want.history, number) for want in wanted])
                values[number] = batch * (1 + worth) / seconds
                continue
            sizes = np.array(ladder.sizes[: ladder.num_within(kind.max_nodes)])
            gains = self._expected(wanted, everyone, number, self._has_bank, plain)
            tokens = 1 + np.cumsum(gains[:, : len(sizes)], axis=1)
            rows = 1.0 + sizes if costs.table.is_padded else batch * (1.0 + sizes)
            ahead = self._follows and kind.is_beside
            waits = [
                costs.draft(number, batch, min(int(size), kind.depth), ahead) for size in sizes
            ]
            values[number] = (batch * tokens / (costs.targets(batch, rows) + waits)).max(axis=1)
        return values

    def _limit(self, want: Want) -> int:
        """Nodes that the tree of a sequence's draft may have."""
        if want.history.chosen < 0 or len(self.drafts) == 1:
            want.history.chosen = 0
        return _of(want.limits, want.history.chosen, want.limit)

    def _first(self, want: Want) -> int:
        """The draft of a sequence whose tree is drafted whole: the one that it has, if it may."""
        drafts = range(len(self.drafts))
        if _of(want.limits, max(want.history.chosen, 0), want.limit):
            return want.history.chosen
        return next((n for n in drafts if _of(want.limits, n, want.limit)), want.history.chosen)

    # Finding out.

    def _probe(self, wanted: Sequence[Want], limits: Sequence[int]) -> list[int]:
        """Drafts one token for a few sequences, those with least to read."""
        order = sorted(
            (_of(want.behinds, want.history.chosen, want.behind), i)
            for i, want in enumerate(wanted)
            if limits[i] and not self.drafts[want.history.chosen].is_asked_first
        )
        nodes = [0] * len(wanted)
        for behind, i in order[:PROBED]:
            if i == order[0][1] or behind <= CLOSE:
                nodes[i] = 1
        return nodes

    def _try_others(self, wanted: Sequence[Want]) -> dict[int, list[int]]:
        """Asks a draft beside steps for sequences that are not its own: one of which little is known, or the bank is full."""
        if not self._has_bank:
            return {}
        known = [acceptance.num_outcomes for acceptance in self._acceptance]
        for number in sorted(range(len(self.drafts)), key=known.__getitem__):
            is_due = known[number] < self._config.seen_enough or self._is_full
            if is_due and (tried := self._try(wanted, {number}, are_others=True)):
                return tried
        return {}

    def _try(
        self, wanted: Sequence[Want], numbers: Collection[int], are_others: bool = False
    ) -> dict[int, list[int]]:
        """Whom to ask a draft for beside steps: those for whom it has least to read."""
        assert self._costs is not None
        for number in numbers:
            if self.has_trial[number]:
                continue
            order = sorted(
                (_of(want.behinds, number, want.behind), i)
                for i, want in enumerate(wanted)
                if _of(want.limits, number, want.limit)
                and (want.history.chosen == number) is not are_others
            )
            tried: list[int] = []
            num_tokens = 0
            for behind, i in order[:TRIED]:
                num_tokens += behind
                if tried and num_tokens > TRIED_TOKENS:
                    break
                tried.append(i)
            if tried:
                self.has_trial[number] = True
                kind = self.drafts[number]
                depth = 1 if kind.is_asked_first else kind.depth
                cost = self._costs.draft(number, len(tried), depth, self._follows)
                cost += self._config.read_share * self._costs.table.row * num_tokens
                self._pay(TRIAL_COST * cost)
                return {number: tried}
        return {}

    def _spares(self, batch: int, best: _Best, has_prompts: bool) -> bool:
        """Whether a step that the host begins decodes plainly, since trees are worth less than the wait for them.

        Its draft reads meanwhile, so that it can follow on the device in the step behind.
        """
        assert self._costs is not None
        if not self._follows:
            return False
        was_spared, self._is_spared = self._is_spared and not has_prompts, False
        more = self._costs.target(batch, best.rows) - self._costs.plain(batch)
        more += max(self._leads[1] - self._leads[0], 0.0)
        # One behind the other would not be drafted for at all.
        if was_spared or best.added / best.rate > more:
            return False
        self._is_spared = not has_prompts
        return True

    def _must_check(self, batch: int, advantage: float) -> bool:
        """Whether a step without drafts is due, to see what it takes now."""
        assert self._costs is not None
        if not self._was_drafted:
            return False
        cost = max(advantage - 1, 0.05) * self._costs.plain(batch)
        if self._follows:
            cost += max(self._leads[1] - self._leads[0], 0.0)
        share = self._config.check_share * (1 if self._costs.is_compared else UNCOMPARED)
        return self._since_plain * share > cost

    def _is_beside(self, numbers: Collection[int]) -> bool:
        """Whether drafts are asked beside steps to find out."""
        return any(self.drafts[number].is_beside for number in numbers)

    # The bank.

    @property
    def _has_bank(self) -> bool:
        return self._bank > 0 and not self._is_suspended

    @property
    def _is_full(self) -> bool:
        return self._bank >= self._config.bank_steps

    def _resume(self) -> None:
        """Ends a suspension once the bank holds what drafted steps may lose."""
        if self._is_suspended:
            self._is_suspended = not self._affords(self._stake or self._step)

    def _affords(self, loss: float) -> bool:
        """Whether the bank holds some times what finding out may lose, or is full."""
        return self._is_full or self._bank * self._step >= self._config.resume_steps * loss

    def _probe_loss(self, batch: int) -> float:
        """What a step that drafts one token for a few sequences loses where none is right."""
        assert self._costs is not None
        num = min(PROBED, batch)
        more = self._costs.target(batch, batch + num) - self._costs.plain(batch)
        return more + max(self._costs.draft(n, num, 1) for n in range(len(self.drafts)))

    def _pay(self, seconds: float) -> None:
        """Takes what was lost, or adds what is negative."""
        self._bank = min(self._bank - seconds / self._step, self._config.bank_steps)
        if self._bank <= 0 < seconds:
            self._is_suspended = True

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
        """Takes the outcome of the first `num_nodes` nodes of a tree.

        Args:
            accepted: Those that were right.
            brought: How many of these were verified, where not all were.
        """
        if num_nodes and self._costs is not None:
            self._acceptance[draft].record(history, draft, num_nodes, accepted, confidence)
            if history.cost:
                gained = len(accepted) if brought is None else brought
                self._brought(history, draft, gained - history.cost)
                history.cost = 0.0

    def tried(
        self, offer: Offer, draft: int, num_known: int, right: Collection[int], batch: int
    ) -> None:
        """Takes a proposal of a trial, which was not verified but judged by the tokens that came.

        Args:
            num_known: Leading nodes that they judge.
            right: Nodes that were right.
            batch: Sequences of a step now.
        """
        costs = self._costs
        if costs is None:
            return
        acceptance, history = self._acceptance[draft], offer.history
        if self.drafts[draft].is_asked_first:
            row = acceptance.row(history, draft, offer.confidence)
            gains = acceptance.gains([row], [acceptance.pool(history, offer.confidence)])
            within = np.arange(gains.shape[1]) < acceptance.ladder.num_within(offer.num_nodes)
            plain = costs.plain(batch)
            beside = 0 if costs.table.is_padded else batch - 1
            nodes, seconds = self._worthwhile(np.where(within, gains, 0.0), batch, beside, plain)
            brought = sum(node < nodes[0] for node in right)
            self._brought(history, draft, brought - (seconds - plain) * batch / plain)
        if num_known:
            acceptance.record(history, draft, num_known, right, offer.confidence)

    def ended_trial(self, draft: int = 0) -> None:
        """The outcomes of a trial beside other steps were recorded."""
        self.has_trial[draft] = False
        self._rested = 1e9

    def passes(self, seconds: float) -> bool:
        """Takes a step without drafts of so many seconds, if nothing is to be learnt of it; else `observe` is due."""
        if not self.is_deaf or self._costs is None or not self.is_resting:
            return False
        self._rested += seconds
        self._interrupted *= math.exp(-seconds)
        self._pay(-self._config.bank_share * seconds)
        return True

    def observe(self, step: Observed) -> None:
        """Takes what a step took and gave."""
        costs, config = self._costs, self._config
        if costs is None:
            return
        batch, wait = step.batch, step.wait
        is_drafted = wait.levels > 0 or step.rows > costs.table.plain_rows(batch)
        is_changed = is_drafted != self._was_drafted
        self._was_drafted = is_drafted
        self._interrupted *= math.exp(-(step.seconds + wait.lead))
        parts = wait.parts or (((0, wait),) if wait.levels else ())
        cost = costs.target(batch, step.rows)
        if wait.seconds is None:  # the draft's time is in the step's own
            self._follows, self._num_waited, self._is_spared = True, 0, False
            [(number, part)] = parts
            levels = min(part.levels, step.rows - 1)
            if not is_changed:
                costs.waited_within(number, part.sequences, levels, step.rows, step.seconds)
            cost += costs.draft(number, part.sequences, levels, True)
        else:
            self._lead(wait)
            self._num_waited += wait.levels > 0
            self._follows &= self._num_waited < WAITED_STEPS
            is_alone = self._follows and wait.lead > 0
            is_clean = not (
                costs.table.is_padded and (is_changed or any(self.has_trial) or is_alone)
            )
            costs.observe(batch, step.rows, step.seconds, is_clean)
            for number, part in parts:
                is_first = self.drafts[number].is_asked_first
                if not is_changed or is_first:
                    costs.waited(number, part.sequences, part.levels, part.seconds or 0.0)
            cost += max(
                (costs.draft(number, part.sequences, part.levels) for number, part in parts),
                default=0.0,
            )
        if is_drafted:
            self._since_plain += cost
            self._stake = cost - costs.plain(batch)
            loss = cost - step.tokens * costs.plain(batch) / batch
            if not self._is_forced:
                self._pay(loss - config.bank_share * cost)
        else:
            self._since_plain = 0.0
            self._rested += cost
            self._pay(-config.bank_share * cost)
            costs.forget_drafts(cost / config.forget_seconds)
        for acceptance in self._acceptance:
            acceptance.pass_time(cost)
        kept = 1 - cost / config.forget_seconds / 4
        self._num_worth = [max(kept, 0.5) * count for count in self._num_worth]

    def interrupted(self, wait: Wait) -> None:
        """Takes a step with prompts."""
        if self._costs is not None:
            self._interrupted += 1.0
            self._lead(wait)

    def forget(self, history: DraftHistory) -> None:
        """The sequence has ended."""
        if self._costs is not None:
            for number, acceptance in enumerate(self._acceptance):
                acceptance.forget(history, number)

    def _lead(self, wait: Wait) -> None:
        """Learns what the host takes before steps that it begins."""
        assert self._costs is not None
        if wait.lead and self._follows:
            known = self._leads[wait.levels > 0]
            lead = min(wait.lead, 2 * known + self._costs.table.unit)
            self._leads[wait.levels > 0] += (lead - known) / 4

    def _everything(self, limits: list[int]) -> Plan:
        return Plan(limits, self._bucket(len(limits), 1 + max(limits, default=0)))

    def _bucket(self, batch: int, rows: int) -> int:
        if self._costs is None:
            return rows
        return self._costs.table.bucket(batch, rows)


def _of(values: Sequence[int], number: int, default: int) -> int:
    return values[number] if values else default
