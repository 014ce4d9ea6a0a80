"""Tests when a sequence is synced to the draft, by a table of cases.

The expected values follow from these rules. A sequence that a tree is requested for must be synced,
or it gets none. A sync that waits costs memory and a pause later, so that few wait, and only where
no sequence may need them: a sequence that joins may use pages that count as synced, and steps
follow one another on the device only where the draft has all tokens of their sequences. A suspended
draft is not synced before it is asked, unless the hidden states kept for it grow too large; a draft
that reads at no cost is always synced.
"""

import pytest

from verify_service.drafts.sync import (
    MOST_READ,
    PATIENCE,
    SequenceFacts,
    StepFacts,
    Sync,
    decide,
)

SYNC, DEFER, SKIP = Sync

# Steps.
PLAIN = StepFacts()
DRAFTED = StepFacts(has_requests=True)
PROMPTS = StepFacts(has_prompts=True)
SUSPENDED = StepFacts(is_suspended=True)
TRIAL = StepFacts(is_suspended=True, has_requests=True)
GPU = StepFacts(follows=True)
GPU_DRAFTED = GPU._replace(has_requests=True)
GPU_PROMPTS = GPU._replace(has_prompts=True)
GPU_SUSPENDED = GPU._replace(is_suspended=True)

# Sequences.
NEW = SequenceFacts(PATIENCE)  # the draft knows nothing of it
CLOSE = SequenceFacts(1, is_close=True)
FAR = SequenceFacts(PATIENCE + 1)  # has been left out for long
RESTS = FAR._replace(stands_alone=False)
WANTED = CLOSE._replace(is_requested=True)
WANTED_FAR = FAR._replace(is_requested=True)
PROMPT = SequenceFacts(20, is_prompt=True)
CLOSE_PROMPT = PROMPT._replace(lag=1, is_close=True)

CASES = [
    # A tree is requested: it must be told, whatever the step is.
    (DRAFTED, WANTED, SYNC),
    (DRAFTED, WANTED_FAR, SYNC),
    (TRIAL, WANTED_FAR, SYNC),
    (GPU_DRAFTED, WANTED, SYNC),
    (GPU_DRAFTED._replace(has_prompts=True), WANTED, SYNC),
    (DRAFTED._replace(are_requests_alone=False), WANTED_FAR, SYNC),
    # None is requested for it. A few tokens wait for more; what is new is told.
    (PLAIN, CLOSE, DEFER),
    (PLAIN, NEW, SYNC),
    (DRAFTED, CLOSE, DEFER),
    (DRAFTED, NEW, SYNC),
    # Who has not been asked for long goes on to be left out: reading it would make others wait.
    (PLAIN, FAR, SKIP),
    (DRAFTED, FAR, SKIP),
    # Unless a requested one may stand on its pages, or the memory has to be freed, or the draft
    # reads at no cost.
    (DRAFTED._replace(are_requests_alone=False), FAR, SYNC),
    (DRAFTED._replace(must_sync=True), FAR, SYNC),
    (PLAIN._replace(must_sync=True), FAR, SYNC),
    (PLAIN._replace(is_free=True), FAR, SYNC),
    (PLAIN._replace(is_free=True), CLOSE, DEFER),
    # A prompt joins, which may stand on anyone's pages: few tokens wait no longer. Who was left out
    # for long still is, until a tree is requested for the one that joined.
    (PROMPTS, CLOSE, SYNC),
    (PROMPTS, NEW, SYNC),
    (PROMPTS, PROMPT, SYNC),
    (PROMPTS, FAR, SKIP),
    # Nor where the hidden states of somebody are not there yet.
    (PLAIN._replace(all_are_kept=False), CLOSE, SYNC),
    # Suspended: nothing is told to a draft that is not asked.
    (SUSPENDED, CLOSE, SKIP),
    (SUSPENDED, NEW, SKIP),
    (SUSPENDED, FAR, SKIP),
    (SUSPENDED._replace(has_prompts=True), PROMPT, SKIP),
    (TRIAL, CLOSE, SKIP),
    (TRIAL, FAR, SKIP),
    (GPU_SUSPENDED, CLOSE, SKIP),
    (GPU_SUSPENDED._replace(has_requests=True), FAR, SKIP),
    # But for what has grown too large, what the one that is tried may stand on, and free drafts.
    (SUSPENDED._replace(must_sync=True), FAR, SYNC),
    (SUSPENDED._replace(must_sync=True, has_prompts=True), PROMPT, SYNC),
    (TRIAL._replace(are_requests_alone=False), FAR, SYNC),
    (TRIAL._replace(are_requests_alone=False, has_prompts=True), PROMPT, SYNC),
    (SUSPENDED._replace(is_free=True), FAR, SYNC),
    (SUSPENDED._replace(is_free=True, has_prompts=True), PROMPT, SYNC),
    # On a GPU the step behind follows only if the draft stands where all sequences stand.
    (GPU, CLOSE, SYNC),
    (GPU, FAR, SYNC),
    (GPU_DRAFTED, CLOSE, SYNC),
    (GPU_DRAFTED, FAR, SYNC),
    # Nothing follows a step with prompts, so the next one does; but nobody waits for long.
    (GPU_PROMPTS, CLOSE, DEFER),
    (GPU_PROMPTS, CLOSE_PROMPT, DEFER),
    (GPU_PROMPTS, RESTS, DEFER),
    (GPU_PROMPTS, FAR, SYNC),
    (GPU_PROMPTS, PROMPT, SYNC),
    (GPU_PROMPTS._replace(has_requests=True), CLOSE, SYNC),
    (GPU_PROMPTS._replace(has_requests=True), PROMPT, SYNC),
]


@pytest.mark.parametrize(("step", "one", "expected"), CASES)
def test_what_a_step_does_about_a_sequence(
    step: StepFacts, one: SequenceFacts, expected: Sync
) -> None:
    assert decide(step, one) is expected


@pytest.mark.parametrize(("step", "one", "_"), CASES)
def test_nothing_is_told_behind_what_found_no_room(
    step: StepFacts, one: SequenceFacts, _: Sync
) -> None:
    assert decide(step, one, is_full=True) is DEFER


MUCH = WANTED._replace(lag=MOST_READ - 99, is_close=False)


@pytest.mark.parametrize(
    ("step", "one", "num_read", "expected"),
    [
        (DRAFTED, MUCH, 0, SYNC),  # the first is read, however much it is
        (DRAFTED, MUCH._replace(lag=10 * MOST_READ), 0, SYNC),
        (DRAFTED, MUCH, 99, SYNC),
        (DRAFTED, MUCH, 100, DEFER),
        (TRIAL, MUCH, 100, DEFER),
        (DRAFTED, WANTED, MOST_READ, SYNC),  # what steps commit is never too much
        (DRAFTED._replace(are_requests_alone=False), MUCH, 100, SYNC),
        (DRAFTED._replace(is_free=True), MUCH, 100, SYNC),
        (GPU_DRAFTED, MUCH, 100, SYNC),
        (GPU_SUSPENDED._replace(has_requests=True), MUCH, 100, SYNC),
    ],
)
def test_several_that_were_left_out_are_read_a_few_at_a_time(
    step: StepFacts, one: SequenceFacts, num_read: int, expected: Sync
) -> None:
    assert decide(step, one, num_read) is expected


@pytest.mark.parametrize("step", {step for step, _, _ in CASES})
def test_a_silent_step_is_one_that_skips_all(step: StepFacts) -> None:
    everyone = [one for one in (NEW, CLOSE, FAR, RESTS) if not step.has_requests]
    if step.has_prompts:
        everyone += [PROMPT, CLOSE_PROMPT]
    told = [decide(step, one) for one in everyone]
    if step.is_silent:
        assert set(told) == {SKIP}
    elif not step.has_requests:
        assert set(told) != {SKIP}
