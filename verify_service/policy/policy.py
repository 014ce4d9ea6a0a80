"""How much to draft and verify in each step, so that tokens come as fast as they can and never slower than plainly."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

from verify_service.policy.acceptance import Acceptance, DraftHistory, Ladder
from verify_service.policy.messages import Observed, Offer, Plan, Want
from verify_service.policy.probing import Probing
from verify_service.policy.row_choice import CLOSE, RowChoice
from verify_service.policy.step_time import DraftTimes, GridTimes, RowTimes, StepTimes, sizes_apart

START_MARGIN = 1.03  # by which drafting must be faster before it starts
CHANGE_MARGIN = 1.02  # and another size of trees before it is taken instead
TRIAL_SEQUENCES = 4  # drafted for at a time to find out, where each costs
PADDED_TRIAL_SEQUENCES = 8  # likewise, where all rows are computed anyway
# Seconds that a draft on a GPU takes to read a token, about, and within how many what it has to read must have paid.
PADDED_READ_SECONDS, PAYS_WITHIN = 4e-6, 4.0
# Drafting steps after which larger trees are tried once; where steps are padded, each time in vain doubles them.
GROW_STEPS, MOST_GROW_STEPS = 24, 192
TRIAL_ACCEPTANCE = 0.8  # of every node, that the size of a trial's trees is best for
LONG_UNSEEN = 1.0  # seconds after which a sequence left out may be tried again
HICCUP = 3.0  # times what a step was expected to take, at most, that it is taken to have taken
ASK_MEMORY = 12  # proposals on which a sequence's worth of asking rests


class DraftPolicy:
    """Chooses the trees of each step by expected tokens per second.

    Which tokens come out never depends on it, so it may use any measurement. Where steps are
    padded all sequences of a step have the same number of rows and it chooses that; elsewhere it chooses node by node,
    the likeliest first. What does not pay is tried again now and then (`probing`).

    Args:
        times: Of the target's steps; None always drafts all.
        max_nodes: Of a tree.
        depth: Levels of the largest tree.
    """

    def __init__(self, times: StepTimes | None, max_nodes: int, depth: int) -> None:
        self._times = times
        self._max_nodes = max_nodes
        self._depth = depth
        self._acceptance = Acceptance(Ladder(sizes_apart(times, max_nodes)))
        self._draft_times = DraftTimes(times is not None and times.is_padded)
        self._choice = RowChoice(self._acceptance, self._draft_times, max_nodes, depth)
        self._probing = Probing(times is not None and times.is_padded)
        self._is_drafting = False
        self._is_trial = False
        self._is_bold = False  # a trial went well: the next one is for all
        self._rows = 1
        self._was_drafted = False
        self._steps_to_grow = self._grow_steps = GROW_STEPS
        self._is_asked_first = False
        self._ask_worth = 0.3  # of sequences that were not asked for yet

    @property
    def is_padded(self) -> bool:
        """Whether all sequences of a step have the same number of rows."""
        return self._times is not None and self._times.is_padded

    @property
    def is_resting(self) -> bool:
        """Whether nothing but a trial will be drafted for some time, so that a draft need not read along."""
        if self._times is None:
            return False
        return self._rows == 1 if self._times.is_padded else not self._is_drafting

    def plan(self, wanted: Sequence[Want], other_rows: int = 0) -> Plan:
        """What to draft in the coming step.

        Args:
            wanted: All sequences that decode.
            other_rows: Of prompts, in the same step.
        """
        times = self._times
        if not wanted or times is None:
            return self._everything(wanted)
        self._is_bold |= self._acceptance.judge(self._probing.now)
        if not any(want.limit for want in wanted):
            return self._nothing(wanted)
        _look_at(times, wanted)
        if isinstance(times, GridTimes):
            plan = self._plan_grid(times, wanted)
        else:
            plan = self._plan_rows(times, wanted, other_rows)
        if any(want.forced for want in wanted):
            nodes = [
                want.limit if want.forced else num
                for want, num in zip(wanted, plan.nodes, strict=True)
            ]
            plan = Plan(nodes, self._row_bucket(len(wanted), max(nodes) + 1))
        return plan

    def record(
        self,
        history: DraftHistory,
        num_nodes: int,
        accepted: Collection[int],
        confidence: int = 0,
        brought: int | None = None,
    ) -> None:
        """Takes the outcome of the first `num_nodes` nodes of a tree.

        Args:
            accepted: Those that were right.
            brought: How many of these were verified, where not all were.
        """
        if num_nodes and self._times is not None:
            self._acceptance.record(
                history, min(num_nodes, self._max_nodes), accepted, confidence, self._probing.now
            )
            if history.cost:
                self._asked(history, (len(accepted) if brought is None else brought) - history.cost)
                history.cost = 0.0

    def tried(
        self, offer: Offer, num_known: int, right: Collection[int], batch: int
    ) -> tuple[int, int]:
        """Takes a proposal that was not verified but judged by the tokens that came.

        Args:
            num_known: Leading nodes that they judge.
            right: Nodes that were right.
            batch: Sequences of a step now.

        Returns:
            How many nodes would have been verified, and how many of these were right.
        """
        times, history = self._times, offer.history
        if times is None:
            return offer.num_nodes, len(right)
        tree = (history, offer.num_nodes, offer.confidence)
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
            self._acceptance.record(history, num_known, right, offer.confidence, self._probing.now)
        self._asked(history, brought - extra * batch / plain)
        return nodes, brought

    def observe(self, step: Observed) -> None:
        """Takes what a step took and gave."""
        times = self._times
        if times is None:
            return
        if step.wait.seconds is None:
            # Captured steps draft all levels, but which shape was verified is known by the rows alone.
            levels = min(step.wait.levels, step.rows - 1)
            step = replace(step, wait=step.wait._replace(levels=levels))
        batch = step.batch
        plain_rows = 1 if times.is_padded else batch
        is_drafted = step.wait.levels > 0 or step.rows > plain_rows
        seconds = step.seconds + (step.wait.seconds or 0.0)
        is_changed = is_drafted != self._was_drafted
        self._was_drafted = is_drafted
        usual = self._draft_times.steps(step.wait.sequences, step.wait.levels) * times.unit
        self._learn(times, step, is_changed)
        if is_drafted:
            plain = step.tokens * times.seconds(batch, plain_rows) / batch
            if self._is_trial and not times.is_padded:
                # By the clock a busy machine would now and then make a present of a trial, for which more are made.
                plain += step.seconds - times.seconds(batch, step.rows)
            elif not self._is_trial and usual:
                # Neither a hiccup nor a new sequence's prompt, which the draft has to read, is a sign that drafting
                # does not pay.
                if step.wait.seconds:
                    seconds -= max(step.wait.seconds - 2 * usual, 0.0)
                seconds = min(seconds, HICCUP * (times.seconds(batch, step.rows) + usual))
            if self._probing.drafted_step(seconds, plain, self._is_trial):
                self._acceptance.doubt(self._probing.now)
        else:
            is_late = is_changed and times.is_padded
            loss = max(seconds - times.seconds(batch, step.rows), 0.0) if is_late else 0.0
            self._probing.plain_step(seconds, loss)

    def _learn(self, times: StepTimes, step: Observed, is_changed: bool) -> None:
        if is_changed and times.is_padded:
            return  # where steps run ahead, one after a change takes longer than those that follow it
        levels, sequences, wait, _ = step.wait
        context = times.context if isinstance(times, GridTimes) else 0
        if wait is None:
            wait = max(step.seconds - times.seconds(step.batch, step.rows), 0.0)
        elif isinstance(times, GridTimes):
            known = times.per_token
            times.observe(step.batch, step.rows, step.seconds)
            self._draft_times.take_out((times.per_token - known) / times.unit)
        else:
            times.observe(step.batch, step.rows, step.seconds, not self._is_asked_first)
        # After a pause a draft catches up first.
        if levels and not is_changed:
            self._draft_times.observe(sequences, levels, wait / times.unit, context)

    # Where steps are padded.

    def _plan_grid(self, times: GridTimes, wanted: Sequence[Want]) -> Plan:
        batch, ladder, probing = len(wanted), self._acceptance.ladder, self._probing
        totals = [0.0] * len(ladder)
        for want in wanted:
            gains = self._acceptance.gains(want.history, 0, probing.now)
            for i in range(ladder.num_within(want.limit)):
                totals[i] += gains[i]
        shapes = times.rows(batch)
        rates = {rows: self._rate(times, batch, rows, totals) for rows in shapes}
        current = max(rows for rows in shapes if rows <= self._rows)
        best = max(rates, key=rates.__getitem__)
        if best != current:
            margin = 1.0 if best == 1 else CHANGE_MARGIN
            if current == 1:
                reading = PADDED_READ_SECONDS * sum(want.behind for want in wanted)
                margin = START_MARGIN + reading / PAYS_WITHIN
            if rates[best] > margin * rates[current]:
                current, self._grow_steps = best, GROW_STEPS
        if probing.is_stopped:
            current = 1
        self._rows = current
        rows, self._is_trial = current, False
        tried: Sequence[int] = range(batch)
        if current == 1:
            if probing.may_try():
                rows, self._is_trial = self._trial_rows(times, batch), True
                # A draft has less to read for a few.
                tried = sorted(tried, key=lambda i: wanted[i].behind)[:PADDED_TRIAL_SEQUENCES]
        elif probing.must_check(rates[current] / rates[1]):
            rows = 1
        else:
            self._steps_to_grow -= 1
            larger = [rows for rows in shapes if rows > current]
            if self._steps_to_grow <= 0 and larger:
                rows, self._steps_to_grow = larger[0], self._grow_steps
                self._grow_steps = min(2 * self._grow_steps, MOST_GROW_STEPS)
        nodes = [0] * batch
        for i in tried:
            nodes[i] = min(wanted[i].limit, rows - 1)
        return Plan(nodes, rows)

    def _rate(self, times: GridTimes, batch: int, rows: int, totals: Sequence[float]) -> float:
        seconds = times.seconds(batch, rows)
        if rows == 1:
            return batch / seconds
        levels = min(rows - 1, self._depth)
        seconds += self._draft_times.steps(batch, levels) * times.unit
        return (batch + sum(totals[: self._acceptance.ladder.num_within(rows - 1)])) / seconds

    def _trial_rows(self, times: GridTimes, batch: int) -> int:
        """Rows that would be best if drafts were good, which is what a trial asks."""
        sizes = (0, *self._acceptance.ladder.sizes)
        chain = [
            batch * sum(TRIAL_ACCEPTANCE ** (i + 1) for i in range(a, min(b, self._depth)))
            for a, b in itertools.pairwise(sizes)
        ]
        return max(times.rows(batch)[1:], key=lambda rows: self._rate(times, batch, rows, chain))

    # Where rows add up.

    def _plan_rows(self, times: RowTimes, wanted: Sequence[Want], other_rows: int) -> Plan:
        probing, choice, batch = self._probing, self._choice, len(wanted)
        plain = batch / times.seconds(batch, batch)
        trees = [
            (
                want.history,
                want.limit if choice.pays_to_read(times, want, batch, probing.now) else 0,
                0,
            )
            for want in wanted
        ]
        items = choice.items(trees, probing.now)
        best_rate, nodes = 0.0, [0] * batch
        for levels in range(1, self._depth + 1):
            rate, chosen = choice.best(times, batch, other_rows, items, levels)
            if rate > best_rate:
                best_rate, nodes = rate, chosen
        margin = 1.0 if self._is_drafting else START_MARGIN
        self._is_drafting = best_rate > margin * plain and not probing.is_stopped
        self._is_trial = False
        if not self._is_drafting:
            nodes = [0] * batch
            # What steps with prompts lose is not observed.
            if not other_rows and probing.may_try(self._is_bold):
                self._is_trial = True
                self._try_unseen(wanted, nodes, batch if self._is_bold else TRIAL_SEQUENCES)
                self._is_bold = False
        elif not other_rows and probing.must_check(best_rate / plain):
            nodes = [0] * batch
        else:
            self._steps_to_grow -= 1
            if self._steps_to_grow <= 0:
                self._steps_to_grow = GROW_STEPS
                nodes = [
                    min(num + 1, want.limit) if num else 0
                    for num, want in zip(nodes, wanted, strict=True)
                ]
            self._try_unseen(wanted, nodes, 1 + batch // TRIAL_SEQUENCES, LONG_UNSEEN)
        return Plan(nodes, 1 + max(nodes))

    def _try_unseen(
        self, wanted: Sequence[Want], nodes: list[int], count: int, unseen: float = 0.0
    ) -> None:
        """Drafts one token for up to `count` sequences that were left out longest, if for longer than `unseen`.

        One whose draft has much to read is tried alone, and only where there is no other.
        """
        before = self._probing.now - unseen
        left_out = [
            i
            for i, want in enumerate(wanted)
            if nodes[i] == 0 and want.limit and want.history.seen <= before
        ]
        left_out.sort(key=lambda i: (max(wanted[i].behind, CLOSE), wanted[i].history.seen))
        for i in left_out[:count]:
            if i != left_out[0] and wanted[i].behind > CLOSE:
                break
            nodes[i] = 1

    # Drafts that are asked first, since asking costs next to nothing.

    def ask(self, wanted: Sequence[Want]) -> Plan:
        """Whom to ask such a draft for; what to verify of the proposals is then `trim`'s to say."""
        self._is_asked_first = True
        times, probing, batch = self._times, self._probing, len(wanted)
        if times is None or any(want.forced for want in wanted):
            return self._everything(wanted)
        if not any(want.limit for want in wanted):
            return self._nothing(wanted)
        _look_at(times, wanted)
        rate = batch / times.seconds(batch, 1 if times.is_padded else batch)
        cost = rate * self._draft_times.steps(batch, 1) * times.unit
        worth = 0.0
        for want in wanted:
            if want.limit:
                worth += self._ask_worth if want.history.worth is None else want.history.worth
        margin = 1.0 if self._is_drafting else START_MARGIN
        self._is_drafting = worth > margin * cost and not probing.is_stopped
        self._is_trial = not self._is_drafting and probing.may_try()
        if not self._is_drafting and not self._is_trial:
            return self._nothing(wanted)
        return self._everything(wanted)

    def trim(self, offers: Sequence[Offer]) -> Plan:
        """What to verify of the proposals of a step, those that are empty included."""
        times, batch = self._times, len(offers)
        if times is None:
            nodes = [offer.num_nodes for offer in offers]
            return Plan(nodes, 1 + max(nodes, default=0))
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
                self._asked(offer.history, 0.0)
        return Plan(nodes, rows)

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

    def _asked(self, history: DraftHistory, tokens: float) -> None:
        """Learns what it brought to ask for a sequence."""
        if history.worth is None:
            history.worth = self._ask_worth
        history.worth += (tokens - history.worth) / ASK_MEMORY
        self._ask_worth += (tokens - self._ask_worth) / ASK_MEMORY / 4

    def _everything(self, wanted: Sequence[Want]) -> Plan:
        nodes = [want.limit for want in wanted]
        return Plan(nodes, self._row_bucket(len(wanted), 1 + max(nodes, default=0)))

    def _nothing(self, wanted: Sequence[Want]) -> Plan:
        return Plan([0] * len(wanted), 1)

    def _row_bucket(self, batch: int, rows: int) -> int:
        if not isinstance(self._times, GridTimes):
            return rows
        return next(size for size in self._times.rows(batch) if size >= rows)


def _look_at(times: StepTimes, wanted: Sequence[Want]) -> None:
    if isinstance(times, GridTimes):
        times.context = sum(want.context for want in wanted)
