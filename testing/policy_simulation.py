"""Runs a policy against a model of steps: sequences that end and begin, steps that run ahead,
prompts that interrupt them.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from testing.step_model import StepModel, accepted_nodes, tree_shape
from testing.step_trace import Trace, TraceStep
from verify_service.controller.controller import Controller
from verify_service.controller.messages import (
    NO_WAIT,
    Candidate,
    DraftHistory,
    DraftKind,
    Observed,
    Plan,
    Wait,
)

HOST_SECONDS = 5e-4  # the host's work for a step; it waits for the rest
BRIEF = 24  # tokens of a sequence that a draft reads in no time
JUDGED_SECONDS = 0.02  # after which the tokens of a few steps have said what a trial was worth
FIRST_STEPS = 3  # of a shape, which take longer
PROMPT = 256  # tokens, which a draft reads with the first tree that it is asked for


@dataclass(slots=True)
class Answer:
    """A running sequence; its draft has not been sent the last `behind` tokens."""

    history: DraftHistory = field(default_factory=DraftHistory)
    num_left: int = 512
    context: int = PROMPT
    behind: int = PROMPT
    rate: float | None = None  # accept rate, once it was drafted for


@dataclass(frozen=True, slots=True)
class Load:
    """A load from `start` seconds on: number of sequences, and the range of their chances of
    right drafts.

    Attributes:
        arrivals: Further sequences per second, each in the place of a running one; their prompts
            are computed in a step.
    """

    start: float
    batch: int
    acceptance: tuple[float, float]
    arrivals: float = 0.0


class FixedNodes(Controller):
    """Drafts the same number of nodes for every sequence in every step; with 0 the draft is
    sent nothing.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__(None, [DraftKind(max(nodes, 1), 1)])
        self._nodes = nodes

    @property
    def is_suspended(self) -> bool:
        """See Controller."""
        return self._nodes == 0

    @property
    def stays_suspended(self) -> bool:
        """See Controller."""
        return self._nodes == 0

    def plan(
        self, candidates: Sequence[Candidate], other_rows: int = 0, is_ahead: bool = False
    ) -> Plan:
        """See Controller."""
        return Plan([min(one.limits[0], self._nodes) for one in candidates], 1 + self._nodes)


def simulate(
    model: StepModel,
    policy: Controller,
    loads: Sequence[Load],
    seconds: float,
    *,
    seed: int = 0,
    noise: float = 0.03,
    answer: int = 512,
    are_alike: bool = False,
) -> Trace:
    """Runs a policy against the model.

    Args:
        noise: Standard deviation of a step's time; one step in 500 stalls besides.
        answer: Tokens of an answer; then another sequence takes its place.
        are_alike: Whether as many nodes of a chain are right for all sequences of a step, as with
            simulated accept lengths.
    """
    run = _Run(model, policy, random.Random(seed), noise, answer, are_alike)
    pending = list(loads)
    arrivals: Iterator[float] = iter(())
    due = float("inf")
    while run.now < seconds:
        while pending and pending[0].start <= run.now:
            load = pending.pop(0)
            run.resize(load)
            arrivals = _arrivals(load, random.Random(seed))
            due = next(arrivals, float("inf"))
        num_prompts = 0
        while due <= run.now:
            num_prompts += 1
            due = next(arrivals, float("inf"))
        run.step(num_prompts)
    return run.trace


def _arrivals(load: Load, rng: random.Random) -> Iterator[float]:
    due = load.start
    while load.arrivals:
        due += rng.expovariate(load.arrivals)
        yield due


class _Run:
    def __init__(
        self,
        model: StepModel,
        policy: Controller,
        rng: random.Random,
        noise: float,
        answer: int,
        are_alike: bool,
    ) -> None:
        self.trace, self.now = Trace(model), 0.0
        self._model = model
        self._policy = policy
        self._rng = rng
        self._noise = noise
        self._answer = answer
        self._are_alike, self._seed = are_alike, rng.getrandbits(32)
        self._draw = (-1, 0.0)  # a step's number, and what all of its sequences draw
        self._answers: list[Answer] = []
        self._acceptance = (0.0, 0.0)
        self._tree = {one: i for i, one in enumerate(zip(*tree_shape(model.tree), strict=True))}
        self._was_drafted = False
        self._begun: Counter[tuple[int, int]] = Counter()  # steps with drafts, by shape
        self._unread = 0  # tokens that were sent to the draft, which has not read them
        self._host = (
            0.0  # seconds that it has spent on the coming step, beside what every step takes
        )
        self._trial: list[tuple[DraftHistory, int, list[int]]] = []  # outcomes of one beside steps
        self._judged_at = self._busy_until = (
            0.0  # when they are known, and until when the draft works at it
        )
        # Reports the newest step to the policy once its outcome is known.
        self._late: Callable[[], None] | None = None

    def resize(self, load: Load) -> None:
        """Changes the load."""
        answers = self._answers
        self._acceptance = load.acceptance
        del answers[load.batch :]
        for one in answers:
            one.rate = None
        while len(answers) < load.batch:
            answers.append(Answer(num_left=self._rng.randint(1, self._answer)))

    def step(self, num_prompts: int) -> None:
        """Runs a step, with the prompts of `num_prompts` new sequences."""
        model, policy, answers = self._model, self._policy, self._answers
        padded, batch = model.is_padded, len(answers)
        plan = self._plan(0, self._late is not None)
        # A step can start before the previous one ends if its draft was sent everything.
        is_told = not any(one.behind for one in answers)
        can_follow = is_told if any(plan.nodes) else not self._was_drafted
        is_ahead = self._late is not None and can_follow and not num_prompts
        if not is_ahead and padded:
            # The outcome of the step under way is waited for, and the policy asked again.
            self._land()
            plan = self._plan(num_prompts, False)
        nodes = plan.nodes
        is_drafted, num_asked = any(nodes), sum(map(bool, nodes))
        pairs = list(zip(answers, nodes, strict=True))
        unread = sum([one.behind for one, num in pairs if num]) if is_drafted else 0
        lead = 0.0
        if padded and not is_ahead:
            if is_drafted or not policy.is_suspended:
                lead = model.change_seconds(num_asked, unread)
            elif self._was_drafted:
                lead = model.change_seconds(0, 0)
            if (
                not is_drafted and not policy.is_suspended
            ):  # the draft is synced, and reads meanwhile
                self._unread = sum([one.behind for one in answers])
        late = max(self._busy_until - self.now, 0.0)
        if is_drafted:
            lead += late
        factor = max(0.7, self._rng.gauss(1, self._noise))
        outcomes = [self._commit(one, num) for one, num in pairs]
        tokens = batch + sum([len(path) for _, _, path in outcomes])
        is_told = padded and not is_ahead and not is_drafted and not policy.is_suspended
        if is_told:
            for one in answers:
                one.behind = 0
        context = sum([one.context for one in answers])
        rows = plan.rows if padded else batch + sum(nodes)
        target = model.seconds(batch, rows, context) + model.told * is_told
        if num_prompts:
            target = model.prompt + target - model.seconds(batch, 1, context)
        elif is_ahead and is_drafted and self._unread:
            target += model.change_seconds(0, self._unread) - model.change_seconds(0, 0)
            self._unread = 0
        levels = min(max(nodes), model.tree[0])
        if late and not is_drafted:
            factor *= 1 + model.beside
        if not is_drafted:
            # What it does besides comes on top where it does not wait so long.
            waits = max(target - HOST_SECONDS, 0.0)
            target += max(self._host - waits, 0.0) if padded else 0.0
        self._host = 0.0
        target = factor * target + model.stall * (self._rng.random() < 0.002)
        if is_drafted:
            self._begun[batch, rows] += 1
            target += model.first * (self._begun[batch, rows] <= FIRST_STEPS)
        draft = factor * model.draft_seconds(num_asked, levels) + lead
        self.now += target + draft
        self._was_drafted = is_drafted
        if is_ahead and is_drafted:
            # A captured draft step always drafts all its levels.
            wait = Wait(model.tree[0], num_asked, None)
        elif is_drafted:
            wait = Wait(levels, num_asked, draft, lead=draft, unread=unread * padded)
        else:
            wait = NO_WAIT._replace(lead=lead)

        def tell() -> None:
            if num_prompts:
                policy.interrupted(wait)
            elif not policy.passes(target + draft, wait.lead):
                policy.observe(Observed(batch, rows, target + draft - wait.lead, tokens, wait))
            for outcome in outcomes if is_drafted else ():  # plain steps show nothing
                policy.record(*outcome)

        if sum([one.behind for one in answers]) > model.kept:
            for one in answers:
                one.behind = 0
        self._land()
        self._late = tell
        if not padded or num_prompts:
            self._land()
        self._replace(num_prompts)
        each = rows if padded else rows // batch
        self.trace.steps.append(TraceStep(self.now, target + draft, batch, each, tokens, context))

    def _plan(self, num_prompts: int, is_ahead: bool) -> Plan:
        if self._trial and self.now > max(self._judged_at, self._busy_until):
            trial, self._trial = self._trial, []
            for outcome in trial:
                self._policy.record(*outcome)
            self._policy.ended_trial()
        if self._policy.stays_suspended:
            return Plan([0] * len(self._answers), 1)
        whole, none, padded = [self._model.tree[2]], [0], self._model.is_padded
        candidates = [
            Candidate(
                one.history,
                whole if one.num_left > 1 else none,
                [one.behind] if padded else none,
                context=one.context,
            )
            for one in self._answers
        ]
        plan = self._policy.plan(candidates, num_prompts, is_ahead)
        self._host += len(candidates) * self._model.host[0]
        if plan.tried:
            self._try([self._answers[i] for i in plan.tried[0]])
        return plan

    def _try(self, tried: Sequence[Answer]) -> None:
        """Requests whole trees beside steps."""
        model = self._model
        # A few tokens of each are read as quickly as what a step commits.
        num_unread = sum(one.behind for one in tried if one.behind > BRIEF)
        seconds = model.change_seconds(0, num_unread) - model.change_seconds(0, 0)
        self._judged_at = self.now + JUDGED_SECONDS
        self._busy_until = self.now + (1 + model.beside) * seconds
        nodes = model.tree[2]
        for one in tried:
            one.behind = 0
            path = accepted_nodes(self._tree, nodes, self._rate(one), self._rng)
            self._trial.append((one.history, nodes, path))

    def _rate(self, one: Answer) -> float:
        if one.rate is None:
            one.rate = self._rng.uniform(*self._acceptance)
        return one.rate

    def _alike(self, mean: float) -> int:
        """Returns the number of right nodes in a step: `mean` on average, rounded up or down."""
        number = len(self.trace.steps)
        if self._draw[0] != number:
            self._draw = number, random.Random(self._seed + number).random()
        return int(mean + self._draw[1])

    def _land(self) -> None:
        if self._late is not None:
            self._late()
        self._late = None

    def _commit(self, one: Answer, num: int) -> tuple[DraftHistory, int, list[int]]:
        """Returns the tokens that a tree of this many nodes gives a sequence."""
        rate = one.rate or self._rate(one)
        if not num:
            one.num_left -= 1
            one.context += 1
            one.behind += 1
            return one.history, 0, []
        if self._are_alike:
            path = list(range(num))[: self._alike(rate * self._model.tree[0])]
        else:
            path = accepted_nodes(self._tree, num, rate, self._rng)
        path = path[: one.num_left - 1]
        one.num_left -= len(path) + 1
        one.context += len(path) + 1
        one.behind = 0
        return one.history, num, path

    def _replace(self, num_prompts: int) -> None:
        """Replaces sequences that have ended, and some others."""
        answers = self._answers
        for i, one in enumerate(answers):
            if one.num_left <= 0:
                behind = PROMPT * (not self._was_drafted)
                answers[i] = Answer(num_left=self._answer, behind=behind)
            elif num_prompts:  # the next step sends what was committed beside them
                one.behind += 1
        if num_prompts:
            for i in self._rng.sample(range(len(answers)), min(num_prompts, len(answers))):
                answers[i] = Answer(num_left=self._rng.randint(1, self._answer))
