"""How much to draft and verify in each step, so that tokens come as fast as they can and never slower than plainly."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from verify_service.policy.acceptance import Acceptance, DraftHistory, Ladder
from verify_service.policy.asking import AskedFirst
from verify_service.policy.grid_choice import GridChoice
from verify_service.policy.messages import Observed, Offer, Plan, Wait, Want
from verify_service.policy.probing import Probing
from verify_service.policy.row_choice import CLOSE, RowChoice
from verify_service.policy.step_time import DraftTimes, GridTimes, RowTimes, StepTimes, sizes_apart

START_MARGIN = 1.03  # by which drafting must be faster before it starts
TRIAL_SEQUENCES = 4  # drafted for at a time to find out
GROW_STEPS = 24  # drafting steps after which larger trees are tried once
LONG_UNSEEN = 1.0  # seconds after which a sequence left out may be tried again
HICCUP = 3.0  # times what a step was expected to take, at most, that it is taken to have taken


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
        self._acceptance = Acceptance(Ladder(sizes_apart(times, max_nodes)), self.is_padded)
        self._draft_times = DraftTimes(self.is_padded)
        self._choice = RowChoice(self._acceptance, self._draft_times, max_nodes, depth)
        self._probing = Probing(self.is_padded)
        self._is_drafting = False
        self._is_trial = False
        self._is_bold = False  # a trial went well: the next one is for all
        self._was_drafted = False
        self._steps_to_grow = GROW_STEPS
        self._grid = GridChoice(self._acceptance, self._draft_times, self._probing, depth)
        self._asked_first = None
        if times is not None:
            self._asked_first = AskedFirst(
                times, self._acceptance, self._draft_times, self._choice, self._probing, depth
            )

    @property
    def is_padded(self) -> bool:
        """Whether all sequences of a step have the same number of rows."""
        return self._times is not None and self._times.is_padded

    @property
    def is_resting(self) -> bool:
        """Whether nothing but a trial will be drafted for some time, so that a draft need not read along."""
        if self._times is None:
            return False
        return self._grid.rows == 1 if self._times.is_padded else not self._is_drafting

    @property
    def rests_on(self) -> bool:
        """Whether the next plan is one without drafts surely, so that it need not be asked for."""
        return self.is_padded and not self._is_asked and self._grid.rests_on

    @property
    def is_deaf(self) -> bool:
        """Whether a draft that rests need not even be kept anything for; see `GridChoice.is_deaf`."""
        return self.is_padded and self._grid.is_deaf

    def plan(self, wanted: Sequence[Want], other_rows: int = 0, is_ahead: bool = False) -> Plan:
        """What to draft in the coming step.

        Args:
            wanted: All sequences that decode.
            other_rows: Of prompts, in the same step.
            is_ahead: The step is to be started behind one under way.
        """
        times = self._times
        if not wanted or times is None:
            return self._everything(wanted)
        self._is_bold |= self._acceptance.judge(self._probing.now)
        if not any(want.limit for want in wanted):
            return self._nothing(wanted)
        _look_at(times, wanted)
        if isinstance(times, GridTimes):
            plan = self._grid.plan(times, wanted, other_rows > 0, is_ahead)
        else:
            plan = self._plan_rows(times, wanted, other_rows)
        if any(want.forced for want in wanted):
            nodes = [
                want.limit if want.forced else num
                for want, num in zip(wanted, plan.nodes, strict=True)
            ]
            plan = plan._replace(nodes=nodes, rows=self._row_bucket(len(wanted), max(nodes) + 1))
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
            if self._asked_first is not None:
                self._asked_first.record(history, len(accepted) if brought is None else brought)

    def ended_trial(self, num_outcomes: int) -> None:
        """So many outcomes of a trial beside other steps were recorded."""
        self._grid.ended_trial(num_outcomes)

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
        if self._asked_first is None:
            return offer.num_nodes, len(right)
        return self._asked_first.tried(offer, num_known, right, batch)

    def passes(self, seconds: float, tokens: int) -> bool:
        """Takes a step without drafts that took so long from its beginning on, if that is all that is asked; else `observe` is due."""
        return self.is_padded and self._grid.passes(seconds, tokens)

    def observe(self, step: Observed) -> None:
        """Takes what a step took and gave."""
        times = self._times
        if times is None:
            return
        if step.wait.seconds is None:
            # Captured steps draft all levels, but which shape was verified is known by the rows alone.
            levels = min(step.wait.levels, step.rows - 1)
            step = replace(step, wait=step.wait._replace(levels=levels))
        if isinstance(times, GridTimes) and not self._is_asked and self._grid.settles(times, step):
            self._probing.pass_time(step.seconds + step.wait.lead)
            return
        batch = step.batch
        plain_rows = 1 if times.is_padded else batch
        is_drafted = step.wait.levels > 0 or step.rows > plain_rows
        seconds = step.seconds + (step.wait.seconds or 0.0)
        if (
            times.is_padded and step.wait.lead
        ):  # steps that are not started ahead begin with the host
            seconds = step.seconds + step.wait.lead
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
            loss = 0.0
            if times.is_padded and (is_changed or self._grid.has_trial):
                loss = max(seconds - times.seconds(batch, step.rows), 0.0)
            self._probing.plain_step(seconds, loss)

    def interrupted(self, batch: int, tokens: int, seconds: float, wait: Wait) -> None:
        """Takes a step with prompts; where rows add up, what it takes beside these is like in any other.

        Args:
            batch: Sequences that decoded.
            tokens: Committed by these.
            seconds: Of the target's part.
        """
        if isinstance(self._times, GridTimes):
            self._grid.interrupted(self._times, batch, tokens, seconds, wait)

    def _learn(self, times: StepTimes, step: Observed, is_changed: bool) -> None:
        is_alone = self._grid.follows and step.wait.lead > 0
        if times.is_padded and (is_changed or is_alone or self._grid.has_trial):
            # Where steps run ahead, one after a change takes longer than those that follow it, as do one beside a trial and one that
            # the host begins, whose draft is told of others meanwhile.
            return
        levels, sequences, wait = step.wait.levels, step.wait.sequences, step.wait.seconds
        context = times.context if isinstance(times, GridTimes) else 0
        if wait is None:
            wait = max(step.seconds - times.seconds(step.batch, step.rows), 0.0)
            if isinstance(times, GridTimes):
                times.age()
        elif isinstance(times, GridTimes):
            known = times.per_token
            times.observe(step.batch, step.rows, step.seconds)
            self._draft_times.take_out((times.per_token - known) / times.unit)
        else:
            times.observe(step.batch, step.rows, step.seconds)
        is_usual = step.wait.seconds is None or not self._grid.follows
        # After a pause a draft catches up first.
        if levels and is_usual and not is_changed:
            self._draft_times.observe(sequences, levels, wait / times.unit, context)

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
        times, asked = self._times, self._asked_first
        if asked is not None:
            asked.is_used = True
        if times is None or asked is None or any(want.forced for want in wanted):
            return self._everything(wanted)
        if not any(want.limit for want in wanted):
            return self._nothing(wanted)
        _look_at(times, wanted)
        may_ask = asked.may_ask(wanted)
        self._is_trial = asked.is_trial
        return self._everything(wanted) if may_ask else self._nothing(wanted)

    def trim(self, offers: Sequence[Offer]) -> Plan:
        """What to verify of the proposals of a step, those that are empty included."""
        if self._asked_first is None:
            nodes = [offer.num_nodes for offer in offers]
            return Plan(nodes, 1 + max(nodes, default=0))
        return Plan(*self._asked_first.trim(offers))

    @property
    def _is_asked(self) -> bool:
        """Whether the draft is one that is asked first."""
        return self._asked_first is not None and self._asked_first.is_used

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
