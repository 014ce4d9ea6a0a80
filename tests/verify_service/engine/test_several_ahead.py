"""Several drafts, some of them on the device, leave the text of overlapped steps as plain decoding
gives it.

Between steps sequences join and leave at random, are cancelled or preempted, and drafts die.
"""

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from testing.oracle_draft import NODES, PAGE, VOCAB, OracleDraft, Run
from testing.rounds import rounds
from verify_service.controller.controller import Controller
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import Candidate, DraftKind
from verify_service.controller.tables import GridTable
from verify_service.drafts.drafts import Drafts
from verify_service.engine.engine import Engine, EngineLimits
from verify_service.metrics import MIXED_STEPS, OVERLAPPED_STEPS, SeveralMetrics

GRID = GridTable({(b, r): 0.004 + 1e-5 * b * r for b in (1, 3, 5) for r in (1, 3, NODES + 1)})


class PartOracle(OracleDraft):
    """One of several."""

    def __init__(self, rng: random.Random, run: Run, name: str) -> None:
        super().__init__(rng, run.target, name, is_host=name == "NGRAM")
        if run.draft is not None:
            self.answers = run.draft.answers

    def is_left_out(self) -> bool:
        return self._rng.random() < 0.5


class SeveralRun(Run):
    """The engine with two or three drafts, the last of them beside the device, and a choice that
    changes its mind.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, has_draft=True)
        rng = self.rng
        names = ["EAGLE3", "STANDALONE", "NGRAM"] if seed % 2 else ["EAGLE3", "NGRAM"]
        self.parts = [PartOracle(rng, self, name) for name in names]
        self.draft = self.parts[0]
        drafts = Drafts(self.parts)  # type: ignore[arg-type]
        sizes = [NODES - 2 * part.capabilities.is_free for part in self.parts]
        controller = Controller(
            CostModel(GRID), [DraftKind(size, size) for size in sizes], rng.random() < 0.5
        )
        limits = EngineLimits(VOCAB, 40, self.pool.num_pages, PAGE, 5, frozenset({7}), NODES)
        self.engine = Engine(
            self.target,
            self.scheduler,
            drafts,
            controller,
            limits,
            SeveralMetrics(names),
        )
        self.preferred, self.is_split = 0, False

        of_drafts = controller._goodput.of_drafts

        def values(candidates: Sequence[Candidate], deviations: float) -> np.ndarray:
            found = np.ones_like(of_drafts(candidates, deviations))
            for i, one in enumerate(candidates):
                preferred = self.preferred + (self.is_split and id(one.history) // 64 % 3)
                found[preferred % len(self.parts), i] = 2.0
            return found

        controller._goodput.of_drafts = values  # type: ignore[method-assign]


@settings(max_examples=rounds(60, 150), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_schedules_give_what_plain_decoding_gives(seed: int) -> None:
    run = SeveralRun(seed)
    rng = run.rng
    for _ in range(rng.randrange(10, 60)):
        what = rng.random()
        if what < 0.25 and len(run.wanted) < 10:
            run.join()
        elif what < 0.3 and run.wanted:
            tag = rng.randrange(len(run.wanted))
            run.cancelled.add(tag)
            run.engine.cancel(tag + 1)
        elif what < 0.35:
            part = rng.choice(run.parts)  # dies, or is attached anew
            part.epoch = 0 if part.epoch else part.known_epoch + 1
        elif what < 0.45:
            run.preferred, run.is_split = rng.randrange(3), rng.random() < 0.3
        else:
            run.step()
    run.finish()
    run.check()
    assert run.engine._drafts.assigned == {}
    assert run.engine._sizes._histories == {}


def test_all_draft_and_are_tried_and_those_on_the_device_run_ahead() -> None:
    ahead, mixed = OVERLAPPED_STEPS._value.get(), MIXED_STEPS._value.get()
    counts: dict[str, int] = {}
    for seed in range(40):
        run = SeveralRun(seed)
        for turn in range(4):
            run.join()
            run.step()
            run.preferred, run.is_split = turn % 3, turn == 3
        run.finish()
        run.check()
        names = run.engine._drafts.names
        for name, part in zip(names, run.parts, strict=True):
            for what in ("num_followed", "num_asked", "num_tried"):
                key = f"{name} {what}"
                counts[key] = counts.get(key, 0) + getattr(part, what)
    assert [key for key, count in counts.items() if not count] == ["NGRAM num_followed"]
    assert OVERLAPPED_STEPS._value.get() > ahead
    assert MIXED_STEPS._value.get() > mixed
