"""A model of a fresh stack on two cores, for the controller: its first requests, quiet and with
rivals for the cores.

Step times are the bundled family's on two cores, slow ones and fast ones. Which guesses are right
was recorded on real texts (`benchmarks.record_guesses`): they fail in runs, as drawn ones would
not. No clock, no model. What rivals do is drawn from a seed, apart from what is drafted: stretches
in which everything is slower, and single hiccups of target and draft.
"""

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from testing.step_model import TABLES
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

GUESSES = TABLES / "guesses.json"
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
REQUESTS, PROMPT, TEST_TOKENS = 24, 160, 24  # tokens of a prompt, and of the self-test's texts
NEXT = 5  # number of texts between the first ones of two stacks
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
    """

    timed: list[float]
    steps: list[float]
    thought: float = 0.0


SLOW = Cores(TARGET, TARGET)
FAST = Cores(FAST_TARGET, FAST_STEPS, 0.05e-3)


class Drafts(NamedTuple):
    """A draft: its tree, seconds of an answer, of a level, of a sequence in a level, of a token
    that it reads, and the cores that it runs on.
    """

    name: str
    nodes: int
    answer: float
    level: float
    row: float
    read: float
    cores: Cores = SLOW

    @property
    def has_matches(self) -> bool:
        """Whether it proposes continuations of matches in the text."""
        return self.name == "NGRAM"


DRAFTS = (
    Drafts("NGRAM", 11, 1.3e-3, 0.0, 0.1e-3, 1.5e-6),
    Drafts("EAGLE3", 5, 0.9e-3, 0.75e-3, 0.15e-3, 0.06e-3),
    Drafts("MTP", 5, 0.9e-3, 0.85e-3, 0.17e-3, 0.06e-3),
    Drafts("STANDALONE", 3, 0.9e-3, 0.6e-3, 0.12e-3, 0.06e-3),
)
FAST_DRAFTS = (
    Drafts("NGRAM", 11, 1.2e-3, 0.0, 0.05e-3, 1.5e-6, FAST),
    Drafts("EAGLE3", 5, 2.9e-3, 0.48e-3, 0.05e-3, 0.035e-3, FAST),
    Drafts("MTP", 5, 2.7e-3, 0.55e-3, 0.05e-3, 0.035e-3, FAST),
    Drafts("STANDALONE", 3, 2.7e-3, 0.4e-3, 0.05e-3, 0.035e-3, FAST),
)


class Guess(NamedTuple):
    """What a draft proposes at a place of a text.

    Attributes:
        nodes: Number of nodes.
        right: Nodes on the path that is right.
        confidence: Confidence of the proposal.
    """

    nodes: int = 0
    right: Sequence[int] = ()
    confidence: int = 0

    def within(self, nodes: int) -> "Guess":
        """Returns the first nodes of the proposal."""
        return Guess(min(nodes, self.nodes), self.first(nodes), self.confidence)

    def first(self, nodes: int) -> list[int]:
        """Returns which of the first nodes are right."""
        return [node for node in self.right if node < nodes]

    def judged(self, nodes: int) -> tuple[int, Sequence[int]]:
        """Returns the number of nodes that are judged once the first `nodes` were verified, and
        those of them that are right. The next token judges one more.
        """
        num_right = len(self.first(nodes))
        if num_right == len(self.right):
            return self.nodes, self.right
        return self.right[num_right] + 1, self.right[: num_right + 1]


@functools.cache
def texts(draft: str, nodes: int, is_sampled: bool) -> list[list[Guess]]:
    """Returns a draft's guesses at each place of the recorded texts."""
    lines = json.loads(GUESSES.read_text())[draft][str(int(is_sampled))]
    if draft == "NGRAM":
        return [[_of_word(word) for word in line.split()] for line in lines]
    return [[Guess(nodes, range(int(digit))) for digit in line] for line in lines]


def _of_word(word: str) -> Guess:
    confidence, nodes, *right = (int(digit, 16) for digit in word)
    return Guess(nodes, right, confidence)


@dataclass(slots=True)
class _Request:
    history: DraftHistory
    text: list[Guess]
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
        self.next = NEXT * seed  # number of the next text; stacks begin with other ones

    def request(self, is_sampled: bool) -> _Request:
        """Returns a request for the next text."""
        known = texts(self._draft.name, self._draft.nodes, is_sampled)
        text, self.next = known[self.next % len(known)], self.next + 1
        return _Request(DraftHistory(int(is_sampled)), text, len(text))

    def test(self) -> None:
        """Runs the self-test of a draft with a model: the beginnings of four texts, all drafted."""
        running = [self.request(False) for _ in range(4)]
        for one in running:
            one.left = TEST_TOKENS
        while running:
            self.step(running, is_forced=True)
            running = [one for one in running if one.left > 0]
        self.next -= 4

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
        guesses = [
            one.text[one.position].within(num) for one, num in zip(running, nodes, strict=True)
        ]
        if asked and self._arm == "default":
            self.controller.think()
        if draft.has_matches:
            nodes = [guess.nodes for guess in guesses]
            if self._arm == "default" and asked:
                offers = [
                    Offer(one.history, guess.nodes, guess.confidence)
                    for one, guess in zip(running, guesses, strict=True)
                ]
                nodes = self.controller.trim(offers)
                thought += self._draft.cores.thought
        levels = 1 if draft.has_matches else max(nodes)
        waited = draft.answer + levels * (draft.level + draft.row * len(asked)) if asked else 0.0
        unread = sum(max(running[i].behind - 8, 0) for i in asked)
        waited += draft.read * unread + thought
        seconds, wait = self.machine.passes(self._real.seconds(batch, batch + sum(nodes)), waited)
        tokens = 0
        for i, (one, guess) in enumerate(zip(running, guesses, strict=True)):
            accepted = len(guess.first(nodes[i]))
            if self._arm == "default" and guess.nodes:
                known, right = guess.judged(nodes[i])
                self.controller.record(one.history, known, right, guess.confidence, accepted)
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
            for one in running:
                if one.left <= 0:
                    self.controller.forget(one.history)
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
    left, tokens, first = REQUESTS, 0, 0
    running: list[_Request] = []
    while left or running:
        while left and len(running) < batch:
            running.append(stack.request(is_sampled))
            left -= 1
        before = [one.behind for one in running]
        tokens += stack.step(running)
        one = running[0]
        if not first and (one.behind <= before[0] or left < REQUESTS - batch):
            first = one.steps
        running = [one for one in running if one.left > 0]
    return Served(tokens / stack.machine.worked, first)
