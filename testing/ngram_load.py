"""A model of n-gram drafting on two small cores, for policies: no clock, no model, all drawn from a
seed.

Step times are the bundled family's, as logs of steps showed them, and so is how often matches of
each length are right.
"""

import random
from dataclasses import dataclass, field
from typing import NamedTuple

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

MAX_NODES = 11
# Times of a chain with an empty cache, as measured at start; several sequences take longer.
WIDTHS = [1, 2, 3, 4, 8, 16, 32]
TABLE = [12.7e-3, 15.7e-3, 16.6e-3, 16.8e-3, 19e-3, 21.5e-3, 29.5e-3]
NOISE, DRIFT = 0.05, 0.016  # noise of a step's time; drift of the machine's speed per step


class Machine(NamedTuple):
    """Seconds of a plain step, and additional seconds of a step that verifies anything, of each
    row, of each accepted token, of asking.
    """

    plain: float
    trees: float
    row: float
    accepted: float
    asking: float


class Match(NamedTuple):
    """Matches of one length: their share of all places in a text, and the chances of a right
    first and further node.
    """

    share: float
    first: float
    further: float


# By sequences and whether they are sampled.
MACHINES = {
    (1, False): Machine(16.3e-3, 7e-3, 0.1e-3, 0.1e-3, 1.25e-3),
    (1, True): Machine(18.2e-3, 5e-3, 0.25e-3, 1.8e-3, 1.25e-3),
    (8, False): Machine(38.4e-3, 0.3e-3, 0.58e-3, 0.05e-3, 1.65e-3),
    (8, True): Machine(37.3e-3, 7e-3, 0.6e-3, 1.6e-3, 1.8e-3),
}
# Confidence rises from 1; where nothing matches nothing is proposed.
SAMPLED = (
    Match(0.30, 0.19, 0.5),
    Match(0.09, 0.37, 0.55),
    Match(0.04, 0.53, 0.6),
    Match(0.04, 0.62, 0.65),
    Match(0.02, 0.7, 0.75),
    Match(0.04, 0.87, 0.85),
)
COPIED = (
    Match(0.1, 0.34, 0.6),
    Match(0.05, 0.65, 0.6),
    Match(0.04, 0.61, 0.65),
    Match(0.04, 0.7, 0.85),
    Match(0.04, 0.86, 0.92),
    Match(0.5, 0.97, 0.98),
)
NEW = (Match(0.5, 0.03, 0.3), Match(0.05, 0.1, 0.3))


@dataclass(slots=True)
class Text:
    """A sequence; its matches are right somewhat more or less often than others'."""

    left: int
    deviation: float
    history: DraftHistory = field(default_factory=DraftHistory)


def gain(
    machine: Machine, batch: int, matches: tuple[Match, ...], length: int, answers: int, seed: int
) -> float:
    """Returns tokens per second under the controller over plain decoding's, for answers of
    `length` tokens.

    Args:
        answers: Batches of them, after one that is not counted.
    """
    rng = random.Random(seed)
    controller = Controller(
        CostModel(RowTable(WIDTHS, TABLE)), [DraftKind(MAX_NODES, MAX_NODES, is_asked_first=True)]
    )
    speed, seconds, plain = 1.0, 0.0, 0.0
    for number in range(answers + 1):
        texts = [Text(length, rng.gauss(0, 0.05)) for _ in range(batch)]
        while all(one.left > 0 for one in texts):  # the last few of a batch are another machine
            speed += 0.02 * (1 - speed) + rng.gauss(0, DRIFT)
            took, tokens = _step(machine, controller, texts, matches, speed, rng)
            if number:
                seconds += took
                plain += machine.plain * tokens / len(texts)
        for one in texts:
            controller.forget(one.history)
    return plain / seconds


def _step(
    machine: Machine,
    controller: Controller,
    texts: list[Text],
    matches: tuple[Match, ...],
    speed: float,
    rng: random.Random,
) -> tuple[float, int]:
    """Returns its seconds at the machine's usual speed, and its tokens."""
    candidates = [
        Candidate(one.history, [MAX_NODES * (one.left > 1)], left=one.left) for one in texts
    ]
    asked = sum(map(bool, controller.plan(candidates).nodes))
    if asked:
        controller.think()
    found = [_match(matches, one, rng) if asked else (0, 0) for one in texts]
    offers = [
        Offer(one.history, min(MAX_NODES, one.left - 1) if confidence else 0, confidence)
        for one, (confidence, _) in zip(texts, found, strict=True)
    ]
    nodes = controller.trim(offers) if asked else [0] * len(texts)
    tokens = 0
    for one, offer, num, (_, right) in zip(texts, offers, nodes, found, strict=True):
        accepted = min(right, num)
        if offer.num_nodes:
            # The next token shows whether an unverified proposal was right.
            known = offer.num_nodes if right <= num else num + 1
            controller.record(
                one.history, known, range(min(right, num + 1)), offer.confidence, accepted
            )
        one.left -= 1 + accepted
        tokens += 1 + accepted
    target = machine.plain + machine.row * sum(nodes) + machine.accepted * (tokens - len(texts))
    target += machine.trees * any(nodes)
    wait = machine.asking * bool(asked)
    factor = speed + rng.gauss(0, NOISE)
    rows = len(texts) + sum(nodes)
    said = Wait(1, asked, wait * factor) if asked else NO_WAIT
    controller.observe(Observed(len(texts), rows, target * factor, tokens, said))
    return target + wait, tokens


def _match(matches: tuple[Match, ...], text: Text, rng: random.Random) -> tuple[int, int]:
    """Returns the confidence of a proposal, 0 for none, and the number of its right nodes."""
    place = rng.random()
    for confidence, match in enumerate(matches, 1):
        place -= match.share
        if place < 0:
            right = 0
            chance = match.first + text.deviation
            while right < min(MAX_NODES, text.left - 1) and rng.random() < chance:
                right, chance = right + 1, match.further
            return confidence, right
    return 0, 0
