"""A model of two small cores under requests that come and go, for policies: no clock, no model, all
drawn from a seed.

Times are the bundled family's with its EAGLE-3 head, as a log of steps showed them; `Cpu`
says by how much the table that was measured at start is wrong.
"""

import random
from dataclasses import dataclass, field

from verify_service.controller.controller import Controller
from verify_service.controller.messages import NO_WAIT, Candidate, DraftHistory, Observed, Wait
from verify_service.controller.tables import RowTable

WIDTHS = [1, 2, 3, 4, 6, 8, 16, 32]
REAL = RowTable(WIDTHS, [8.6e-3, 9.8e-3, 13.2e-3, 13.6e-3, 15.3e-3, 17e-3, 22e-3, 34e-3])
CONTEXT = 3.3e-6  # seconds that each token of the sequences' contexts takes of a step
GREEDY_ROW, SAMPLED_ROW = 0.3e-3, 1.1e-3  # seconds of choosing at an accepted row
DRAFT_STEP, DRAFT_LEVEL = 1.5e-3, 1.4e-3  # seconds of an answer, and of each level
GREEDY_LEVEL, SAMPLED_LEVEL = 0.7e-3, 2.6e-3  # seconds of a level for each sequence
DRAFT_READ, PROMPT_READ = 0.06e-3, 0.45e-3  # seconds per token of text, by draft and by target
PROMPT, SHORTEST, LONGEST = 200, 32, 256  # tokens
# Noise of steps; share of stalled steps, and seconds of a stall.
NOISE, STALLED, STALL = 0.08, 0.01, 0.012


@dataclass(frozen=True, slots=True)
class Cpu:
    """Describes a machine.

    Attributes:
        slope: Share of the cost of additional rows that the table measured at start shows.
        aside: Seconds that a draft beside it adds to a step of the target.
        slow: Slowdown factor of everything, for three seconds of every eight.
    """

    slope: float = 1.0
    aside: float = 0.0
    slow: float = 1.0

    def times(self) -> RowTable:
        """Returns the table measured at start."""
        first = 0.85 * REAL.seconds(1, 1)  # time with an empty cache
        more = [0.65 * self.slope * (REAL.seconds(1, n) - REAL.seconds(1, 1)) for n in WIDTHS]
        return RowTable(WIDTHS, [first + seconds for seconds in more])


@dataclass(slots=True)
class Request:
    """A request: its due time, its length, and the chance of right guesses at it."""

    due: float
    is_sampled: bool
    acceptance: float
    length: int
    left: int
    context: int = PROMPT
    behind: int = PROMPT
    began: float = 0.0
    ended: float = 0.0
    history: DraftHistory = field(default_factory=DraftHistory)


@dataclass(frozen=True, slots=True)
class Served:
    """Tokens per second while something ran, and a request's mean seconds between tokens."""

    rate: float
    between: float


def arrivals(
    rate: float, seconds: float, greedy: float, sampled: float, share: float = 0.5, seed: int = 0
) -> list[Request]:
    """Returns requests of a Poisson process.

    Args:
        rate: Requests per second.
        greedy: Chance of a right guess at a greedy text; each request has 0.1 more or less.
        sampled: Chance of a right guess at a sampled text; each request has 0.1 more or less.
        share: Share of sampled requests.
    """
    rng = random.Random(seed)
    due, requests = 0.0, []
    while (due := due + rng.expovariate(rate)) < seconds:
        is_sampled, length = rng.random() < share, rng.randint(SHORTEST, LONGEST)
        acceptance = (sampled if is_sampled else greedy) + rng.uniform(-0.1, 0.1)
        requests.append(Request(due, is_sampled, acceptance, length, length))
    return requests


def serve(
    cpu: Cpu,
    controller: Controller | None,
    requests: list[Request],
    depth: int = 5,
    running: int = 4,
) -> Served:
    """Serves all requests in order.

    Args:
        controller: None for plain decoding.
        depth: Depth of the longest chain.
        running: Maximum number of running requests; the others wait.
    """
    rng = random.Random(0)
    active: list[Request] = []
    pending, now, busy = list(requests), 0.0, 0.0
    while pending or active:
        if not active:
            now = max(now, pending[0].due)
        if pending and pending[0].due <= now and len(active) < running:
            # A step with a prompt, in which the others decode plainly: policies do not observe
            # those.
            taken = PROMPT_READ * PROMPT + sum(_commit(one, 0, 0) for one in active)
            now, busy = now + taken, busy + taken
            active.append(pending.pop(0))
            active[-1].began = now
        nodes = [0] * len(active)
        if controller is not None and not controller.stays_suspended:
            candidates = [
                Candidate(one.history, [max(min(depth, one.left - 1), 0)], [one.behind], one.left)
                for one in active
            ]
            nodes = controller.plan(candidates).nodes
        unread = sum(
            one.behind for one, num in zip(active, nodes, strict=True) if num and one.behind > 8
        )
        target, draft, tokens = _step(cpu, controller, active, nodes, rng)
        factor = cpu.slow if now % 8 < 3 else 1.0
        target, draft = factor * target, factor * draft
        now, busy = now + target + draft, busy + target + draft
        if controller is not None:
            asked = sum(map(bool, nodes))
            wait = Wait(max(nodes), asked, draft, unread=unread) if asked else NO_WAIT
            rows = len(active) + sum(nodes)
            controller.observe(Observed(len(active), rows, target, tokens, wait))
            for one in active:
                if one.left <= 0:
                    controller.forget(one.history)
        for one in active:
            one.ended = now
        active = [one for one in active if one.left > 0]
    between = sum((one.ended - one.began) / one.length for one in requests) / len(requests)
    return Served(sum(one.length for one in requests) / busy, between)


def _step(
    cpu: Cpu,
    controller: Controller | None,
    active: list[Request],
    nodes: list[int],
    rng: random.Random,
) -> tuple[float, float, int]:
    """Returns seconds of the target and of the draft, and tokens."""
    noise = max(0.8, rng.gauss(1, NOISE))
    target = REAL.seconds(1, len(active) + sum(nodes)) + STALL * (rng.random() < STALLED)
    target += CONTEXT * sum(one.context for one in active)
    draft, tokens = 0.0, 0
    if any(nodes):
        target += cpu.aside
        draft += DRAFT_STEP + DRAFT_LEVEL * max(nodes)
    for one, num in zip(active, nodes, strict=True):
        right = 0
        if num:
            draft += num * (SAMPLED_LEVEL if one.is_sampled else GREEDY_LEVEL)
            draft += DRAFT_READ * one.behind
            while right < num and rng.random() < one.acceptance:
                right += 1
            assert controller is not None
            controller.record(one.history, num, range(right))
        target += _commit(one, num, right)
        tokens += 1 + right
    return noise * target, noise * draft, tokens


def _commit(one: Request, num: int, right: int) -> float:
    """Returns the seconds of choosing tokens."""
    one.left -= 1 + right
    one.context += 1 + right
    one.behind = 1 + right if num else one.behind + 1
    return (1 + right) * (SAMPLED_ROW if one.is_sampled else GREEDY_ROW)
