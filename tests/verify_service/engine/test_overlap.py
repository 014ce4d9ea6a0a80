"""Steps that begin before the one before them is known, against plain decoding: random joins,
leaves, cancels, preemptions, deaths of the draft, with trees that are right, wrong and nonsense;
sequences that follow a grammar among others.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testing.oracle_draft import Run
from testing.rounds import rounds
from verify_service.metrics import OVERLAPPED_STEPS


@pytest.mark.parametrize("has_draft", [False, True])
@settings(max_examples=rounds(150, 500))
@given(seed=st.integers(0, 2**32))
def test_random_schedules_give_what_plain_decoding_gives(has_draft: bool, seed: int) -> None:
    run = Run(seed, has_draft)
    rng = run.rng
    for _ in range(rng.randrange(10, 60)):
        what = rng.random()
        if what < 0.25 and len(run.wanted) < 10:
            run.join()
        elif what < 0.3 and run.wanted:
            tag = rng.randrange(len(run.wanted))
            run.cancelled.add(tag)
            run.engine.cancel(tag + 1)
        elif what < 0.33 and run.draft is not None:
            # Dies, or is attached anew.
            run.draft.epoch = 0 if run.draft.epoch else run.draft.known_epoch + 1
        else:
            run.step()
    run.finish()
    run.check()


def test_most_steps_run_ahead_while_nobody_joins() -> None:
    run = Run(3, True)
    run.join()
    while run.engine._steps.has_work or not run.ends:
        run.step()
    run.check()
    assert run.draft is not None
    assert run.draft.num_followed > 0


def test_a_grammar_takes_nobody_out_of_the_steps_that_run_ahead() -> None:
    run = Run(3, True)
    for share in (1.0, 0.0):
        run.share_of_grammars = share
        run.join()
    before = OVERLAPPED_STEPS._value.get()
    num_steps = 0
    while run.engine._steps.has_work or not run.ends:
        run.step()
        num_steps += 1
    run.check()
    assert run.draft is not None
    assert run.target.num_two_phase > 0
    assert OVERLAPPED_STEPS._value.get() - before > num_steps / 3
