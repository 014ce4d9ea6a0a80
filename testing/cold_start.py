"""A model of a fresh stack on two cores, for the controller: its first requests, quiet and with
rivals for the cores.

Step times are the bundled family's on two cores, slow ones and fast ones; chances of a right guess
are its accept lengths (docs/algorithms.md); no clock, no model, all drawn from a seed. What rivals
do is drawn apart from what is drafted: stretches in which everything is slower, and single hiccups
of target and draft.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

from testing.ngram_load import COPIED, NEW, SAMPLED, Match
from verify_service.controller.controller import Controller
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import (
    NO_WAIT,
    Candidate,
    DraftHistory,
    DraftKind,
    Observed,
    Offer,
    Wait,
)
from verify_service.controller.tables import RowTable

WIDTHS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
TARGET = [6.1e-3, 7.6e-3, 7.7e-3, 7.7e-3, 8.3e-3, 8.9e-3, 10.4e-3, 12e-3, 15.2e-3, 18.4e-3]
# Forwards of fast cores as they are timed at start, and whole steps beside a gateway.
FAST_TARGET = [
    2.8e-3,
    2.84e-3,
    2.84e-3,
    2.94e-3,
    3.11e-3,
    3.28e-3,
    3.6e-3,
    3.92e-3,
    4.9e-3,
    5.86e-3,
]
FAST_STEPS = [4.3e-3, 4.3e-3, 4.4e-3, 4.5e-3, 4.7e-3, 4.8e-3, 5.1e-3, 5.4e-3, 6.5e-3, 8e-3]
REQUESTS, TOKENS, PROMPT, TEST_TOKENS = 24, 96, 120, 24
NOISE, BUSY_NOISE = 0.03, 0.06
# Slowness of stretches with rivals, and their mean seconds.
SPEEDS, STRETCH = (1.0, 1.0, 1.6, 2.5), 1 / 3
HICCUPS, HICCUP = 0.1, 3.0
ARMS = ("never", "always", "default")


class Cores(NamedTuple):
    """What a step takes.

    Attributes:
        timed: Seconds of forwards as they are timed at start, by `WIDTHS`.
        steps: Seconds of whole steps, by `WIDTHS`.
        thought: Seconds of a plan, and of choosing what to verify.
        turns: Chances that a greedy text begins and ends to repeat itself, after a token.
        test_chance: Difference of chances between the self-test's texts and others.
    """

    timed: list[float]
    steps: list[float]
    thought: float = 0.0
    turns: tuple[float, float] = (0.0, 0.0)
    test_chance: float = 0.0


SLOW = Cores(TARGET, TARGET)
FAST = Cores(FAST_TARGET, FAST_STEPS, 0.05e-3, (0.03, 0.01), -0.25)


class Drafts(NamedTuple):
    """A draft: its tree, seconds of an answer, of a level, of a sequence in a level, of a token
    that it reads, chances at temperature 0 and 1, and the cores that it runs on.
    """

    name: str
    nodes: int
    answer: float
    level: float
    row: float
    read: float
    chances: tuple[float, float] = (0.0, 0.0)
    cores: Cores = SLOW

    @property
    def has_matches(self) -> bool:
        """Whether it proposes continuations of matches in the text."""
        return not any(self.chances)


DRAFTS = (
    Drafts("NGRAM", 11, 1.3e-3, 0.0, 0.1e-3, 1.5e-6),
    Drafts("EAGLE3", 5, 0.9e-3, 0.75e-3, 0.15e-3, 0.06e-3, (0.74, 0.5)),
    Drafts("MTP", 5, 0.9e-3, 0.85e-3, 0.17e-3, 0.06e-3, (0.68, 0.48)),
    Drafts("STANDALONE", 3, 0.9e-3, 0.6e-3, 0.12e-3, 0.06e-3, (0.74, 0.5)),
)
FAST_DRAFTS = (
    Drafts("NGRAM", 11, 1.2e-3, 0.0, 0.05e-3, 1.5e-6, cores=FAST),
    Drafts("EAGLE3", 5, 2.9e-3, 0.48e-3, 0.05e-3, 0.035e-3, (0.74, 0.5), FAST),
    Drafts("MTP", 5, 2.7e-3, 0.55e-3, 0.05e-3, 0.035e-3, (0.68, 0.48), FAST),
    Drafts("STANDALONE", 3, 2.7e-3, 0.4e-3, 0.05e-3, 0.035e-3, (0.74, 0.5), FAST),
)
SPREAD = 0.1  # difference of chances between texts


class _Text:
    """What a draft guesses of a text, at each position: the same however it is decoded.

    Args:
        rng: Source of chances.
        chance: Chance of a draft with a model; for others, where their matches come from.
        matches: Matches at the text's beginning.
        turns: Chances that the text begins and ends to repeat itself, after a token.
        length: Number of positions.
    """

    def __init__(
        self,
        rng: random.Random,
        chance: float | None,
        matches: tuple[Match, ...],
        turns: tuple[float, float],
        length: int,
    ) -> None:
        self._chance = chance
        self._matches = []
        for _ in range(length):
            repeats = matches is COPIED
            if rng.random() < turns[repeats]:
                matches = NEW if repeats else COPIED
            self._matches.append(matches)
        self._places = [rng.random() for _ in range(length)]
        self._draws = [rng.random() for _ in range(length)]

    def guess(self, position: int, most: int) -> tuple[int, int]:
        """Returns the confidence of the proposal at a position, and how many of its nodes, `most`
        at the most, are right; 0 and 0 where nothing matches.
        """
        confidence, first, further = 0, self._chance, self._chance
        if first is None or further is None:
            confidence, place = 1, self._places[position]
            for match in self._matches[position]:
                if place < match.share:
                    first, further = match.first, match.further
                    break
                confidence, place = confidence + 1, place - match.share
            else:
                return 0, 0
        right = 0
        while right < most and self._draws[position + right] < (further if right else first):
            right += 1
        return confidence, right


@dataclass(slots=True)
class _Request:
    history: DraftHistory
    text: _Text
    left: int
    behind: int = PROMPT
    steps: int = 0
    position: int = 0


class _Machine:
    """Draws the slowness of parts of a step.

    Attributes:
        now: Seconds that have passed.
        worked: Seconds that all parts take with nothing in the way.
    """

    def __init__(self, has_rivals: bool, seed: int) -> None:
        self._rng, self._stretches = random.Random(seed), random.Random(seed + 3)
        self._has_rivals = has_rivals
        self._speed, self._until = 1.0, 0.0
        self.now = self.worked = 0.0

    def passes(self, *parts: float) -> list[float]:
        """Returns the seconds that parts take one after another."""
        self.worked += sum(parts)
        if not self._has_rivals:
            taken = [part * max(0.8, self._rng.gauss(1, NOISE)) for part in parts]
        else:
            while self.now >= self._until:
                self._speed = self._stretches.choice(SPEEDS)
                self._until += self._stretches.expovariate(1 / STRETCH)
            taken = [
                part
                * self._speed
                * max(0.8, self._rng.gauss(1, BUSY_NOISE))
                * (HICCUP if self._rng.random() < HICCUPS else 1.0)
                for part in parts
            ]
        self.now += sum(taken)
        return taken

    def error(self) -> float:
        """Returns a measured time at start as a multiple of the true one."""
        return 1 + abs(self._rng.gauss(0, 0.08 if self._has_rivals else 0.02))


class _Stack:
    def __init__(self, draft: Drafts, has_rivals: bool, arm: str, seed: int) -> None:
        self._draft, self._arm = draft, arm
        self._real = RowTable(WIDTHS, draft.cores.steps)
        self.machine = _Machine(has_rivals, seed)
        table = RowTable(WIDTHS, [seconds * self.machine.error() for seconds in draft.cores.timed])
        kind = DraftKind(draft.nodes, draft.nodes, is_asked_first=draft.has_matches)
        self.controller = Controller(CostModel(table), [kind])
        self.texts = random.Random(seed + 2)

    def request(self, tokens: int, is_sampled: bool, more: float = 0.0) -> _Request:
        """Returns a new request; texts differ. `more` is added to its chance."""
        draft, rng = self._draft, random.Random(self.texts.getrandbits(32))
        chance = draft.chances[is_sampled] + more + rng.uniform(-SPREAD, SPREAD)
        matches = SAMPLED if is_sampled else COPIED if rng.random() < 0.6 else NEW
        turns = (0.0, 0.0) if is_sampled else draft.cores.turns
        known = None if draft.has_matches else chance
        text = _Text(rng, known, matches, turns, tokens + draft.nodes)
        return _Request(DraftHistory(int(is_sampled)), text, tokens)

    def test(self) -> None:
        """Runs the self-test of a draft with a model: four short texts, all drafted."""
        more = self._draft.cores.test_chance
        running = [self.request(TEST_TOKENS, False, more) for _ in range(4)]
        while running:
            self.step(running, is_forced=True)
            running = [one for one in running if one.left > 0]

    def step(self, running: list[_Request], is_forced: bool = False) -> int:
        """Runs a step and returns its tokens."""
        draft, batch, most = self._draft, len(running), self._draft.nodes
        limits = [min(most, one.left - 1) for one in running]
        candidates = [
            Candidate(one.history, [limit], [one.behind], one.left, forced=is_forced)
            for one, limit in zip(running, limits, strict=True)
        ]
        nodes, thought = limits, 0.0
        if self._arm == "never" and not is_forced:
            nodes = [0] * batch
        elif self._arm == "default" and (is_forced or not self.controller.stays_suspended):
            nodes = self.controller.plan(candidates).nodes
            thought = self._draft.cores.thought
        elif self._arm == "default":
            nodes = [0] * batch
        asked = [i for i in range(batch) if nodes[i]]
        offers = [(0, 0)] * batch  # confidence, right nodes
        for i in asked:
            offers[i] = running[i].text.guess(running[i].position, limits[i])
        if asked and self._arm == "default":
            self.controller.think()
        proposed = list(nodes)
        if draft.has_matches:
            proposed = [num * bool(offer[0]) for num, offer in zip(nodes, offers, strict=True)]
            nodes = proposed
            if self._arm == "default" and asked:
                given = [
                    Offer(one.history, num, offer[0])
                    for one, num, offer in zip(running, proposed, offers, strict=True)
                ]
                nodes = self.controller.trim(given)
                thought += self._draft.cores.thought
        levels = 1 if draft.has_matches else max(nodes)
        waited = draft.answer + levels * (draft.level + draft.row * len(asked)) if asked else 0.0
        unread = sum(max(running[i].behind - 8, 0) for i in asked)
        waited += draft.read * unread + thought
        seconds, wait = self.machine.passes(self._real.seconds(batch, batch + sum(nodes)), waited)
        tokens = 0
        for i, one in enumerate(running):
            confidence, right = offers[i]
            accepted = min(right, nodes[i])
            if self._arm == "default" and proposed[i]:
                known = proposed[i] if right <= nodes[i] else nodes[i] + 1
                self.controller.record(
                    one.history, known, range(min(right, nodes[i] + 1)), confidence, accepted
                )
            one.left -= 1 + accepted
            one.position += 1 + accepted
            one.behind = 1 + accepted if i in asked else one.behind + 1
            one.steps += 1
            tokens += 1 + accepted
        if self._arm == "default":
            [known] = self.controller.unread(candidates, nodes)
            said = Wait(levels, len(asked), wait, lead=wait, unread=known) if asked else NO_WAIT
            rows = batch + sum(nodes)
            if asked or not self.controller.passes(seconds):
                self.controller.observe(Observed(batch, rows, seconds, tokens, said))
        return tokens


class Served(NamedTuple):
    """Results of the first requests.

    Attributes:
        rate: Tokens per second of work: rivals slow all alike in the mean, and luck would show.
        first: Number of steps of the first request until something was drafted for it.
    """

    rate: float
    first: int


def serve(
    draft: Drafts, batch: int, is_sampled: bool, has_rivals: bool, arm: str, seed: int
) -> Served:
    """Serves the first requests of a fresh stack, `batch` at a time, after the draft's
    self-test.
    """
    stack = _Stack(draft, has_rivals, arm, seed)
    if arm == "default" and not draft.has_matches:
        stack.test()
        stack.machine.now = stack.machine.worked = 0.0
        stack.texts.seed(seed + 2)
    left, tokens, first = REQUESTS, 0, 0
    running: list[_Request] = []
    while left or running:
        while left and len(running) < batch:
            running.append(stack.request(TOKENS, is_sampled))
            left -= 1
        before = [one.behind for one in running]
        tokens += stack.step(running)
        one = running[0]
        if not first and (one.behind <= before[0] or left < REQUESTS - batch):
            first = one.steps
        running = [one for one in running if one.left > 0]
    return Served(tokens / stack.machine.worked, first)
