"""Tables of what steps and drafts cost."""

import itertools

import pytest

from verify_service.executor.decode_graphs import batch_sizes, row_sizes
from verify_service.policy.step_time import DraftTimes, GridTimes, RowTimes, rising

GRID = {(1, 1): 4.0, (1, 8): 4.5, (8, 1): 5.0, (8, 4): 5.5, (8, 8): 6.5}


def test_real_steps_correct_the_table() -> None:
    times = RowTimes([1, 2, 4], [1.0, 1.0, 1.0])
    for _ in range(100):
        times.observe(1, 1, 1.0)
        times.observe(1, 2, 3.0)
    assert times.seconds(1, 1) == pytest.approx(1.0, rel=0.2)
    assert times.seconds(1, 2) == pytest.approx(3.0, rel=0.2)
    assert times.seconds(1, 1) <= times.seconds(1, 2) <= times.seconds(1, 4)


def test_steps_with_drafts_hardly_move_what_is_believed_of_plain_ones() -> None:
    times = RowTimes([1, 2, 4, 8], [10.0, 11.0, 13.0, 17.0])
    for _ in range(300):
        times.observe(1, 4, 18.0)  # dearer than the table says
    assert times.seconds(1, 4) == pytest.approx(18.0, rel=0.01)
    assert times.seconds(1, 1) < 11.0
    for _ in range(3):
        for _ in range(20):
            times.observe(1, 4, 18.0)
        times.observe(1, 1, 10.0)
    assert times.seconds(1, 1) == pytest.approx(10.0, rel=0.03)
    for _ in range(30):
        times.observe(1, 1, 20.0)  # the machine has become slower, for all
    assert times.seconds(1, 1) == pytest.approx(20.0, rel=0.01)
    assert times.seconds(1, 4) > 30.0
    for _ in range(3000):
        times.observe(1, 1, 20.0)
    # What was seen so long ago is forgotten.
    assert times.seconds(1, 4) == pytest.approx(26.0, rel=0.01)


def test_a_table_measured_on_a_busy_machine_keeps_its_shape() -> None:
    times = RowTimes([1, 2, 4, 8], [10.0, 11.0, 13.0, 17.0])
    for _ in range(60):
        times.observe(1, 1, 1.0)
    assert times.seconds(1, 8) / times.seconds(1, 1) < 3


def test_what_waited_for_other_processes_at_start_is_taken_out() -> None:
    times = RowTimes([1, 8, 16, 32], [5.0, 70.0, 70.0, 76.0])
    times.bound([4.0, 7.0, 10.0, 16.0], num_threads=1)
    table = [times.seconds(1, rows) for rows in (1, 8, 16, 32)]
    assert table == pytest.approx([5.0, 9.625, 13.75, 22.0])
    quiet = RowTimes([1, 32], [5.0, 10.0])
    quiet.bound([6.0, 20.0], num_threads=2)  # one thread waits for the other with few rows
    assert [quiet.seconds(1, 1), quiet.seconds(1, 32)] == [5.0, 10.0]


def test_rising_is_the_nearest_non_decreasing_sequence() -> None:
    assert rising([1, 3, 2, 4]) == [1, 2.5, 2.5, 4]
    assert rising([3, 2, 1]) == [2, 2, 2]
    assert rising([]) == []


def test_steps_are_padded_to_captured_shapes() -> None:
    times = GridTimes(GRID)
    assert times.seconds(1, 2) == 4.5
    assert times.seconds(3, 1) == 5.0
    assert times.seconds(8, 5) == 6.5
    assert times.rows(5) == [1, 4, 8]
    assert times.seconds(100, 1) == 5.0  # larger batches are not captured


def test_a_shape_learns_its_own_time_and_an_outlier_teaches_little() -> None:
    times = GridTimes(GRID)
    times.observe(8, 4, 500.0)
    assert times.seconds(8, 4) < 1.03 * 5.5
    for _ in range(60):
        times.observe(8, 4, 8.0)
    assert times.seconds(8, 4) == pytest.approx(8.0, rel=0.05)
    for _ in range(60):
        times.observe(8, 1, 5.0)
    assert times.seconds(8, 1) == pytest.approx(5.0, rel=0.05)


def test_longer_contexts_make_every_shape_slower() -> None:
    times = GridTimes(GRID)
    times.context = 100_000
    for _ in range(150):
        times.observe(8, 1, 7.0)  # 2.0 longer than with short contexts
    assert times.seconds(8, 4) == pytest.approx(7.5, rel=0.01)
    times.context = 50_000
    assert times.seconds(8, 1) == pytest.approx(6.0, rel=0.01)
    assert times.seconds(1, 8) == pytest.approx(5.5, rel=0.01)
    assert times.unit == 4.0
    times.context = 100  # too few to tell it from anything else
    for _ in range(150):
        times.observe(1, 1, 4.2)
    assert times.unit == pytest.approx(4.2, rel=0.01)
    assert times.per_token == pytest.approx(2e-5, rel=0.1)


def test_the_fastest_of_all_rounds_counts() -> None:
    slow = itertools.cycle([3.0, 2.0, 1.0])
    assert RowTimes.measure([1], lambda rows: next(slow)).seconds(1, 1) == 1.0
    assert GridTimes.measure([(1, 1)], lambda batch, rows: next(slow)).seconds(1, 1) == 1.0


def test_a_drafts_first_answer_may_take_long() -> None:
    times = DraftTimes()
    assert times.steps(1, 5) == 0.0
    times.observe(1, 5, 100.0)
    assert times.steps(1, 5) <= 1.0
    for _ in range(60):
        times.observe(1, 5, 0.3)
    assert times.steps(1, 5) == pytest.approx(0.3, rel=0.1)
    assert times.steps(1, 1) == pytest.approx(0.3 * 3 / 7, rel=0.1)
    assert times.steps(64, 5) == pytest.approx(0.3, rel=0.1)
    assert times.steps(1, 0) == 0.0


def test_what_a_draft_had_to_read_first_is_hardly_taken_for_its_usual_time() -> None:
    times = DraftTimes(is_padded=True)
    for _ in range(60):
        times.observe(64, 3, 0.5)
    times.observe(64, 1, 40.0)  # the first of this size, behind a rest
    assert times.steps(64, 1) < 0.4
    for _ in range(10):
        times.observe(64, 1, 0.3)
    assert times.steps(64, 1) == pytest.approx(0.3, rel=0.1)


def test_what_few_or_old_steps_say_of_a_draft_is_taken_at_its_best() -> None:
    times = DraftTimes(is_padded=True)
    for _ in range(60):
        times.observe(64, 3, 4.0)
    assert times.steps(64, 3) == pytest.approx(4.0, rel=0.02)
    assert times.steps(32, 3) < 3.0  # fewer sequences
    times.observe(32, 5, 3.0)  # perhaps of something else
    assert times.steps(32, 5) < 2.5
    assert times.steps(32, 3) <= times.steps(32, 5)  # fewer levels
    for _ in range(20):
        times.observe(32, 3, 2.0)
    assert times.steps(32, 3) == pytest.approx(2.0, rel=0.05)
    for _ in range(300):
        times.forget(0.01)
    assert times.steps(64, 3) < 2.5
    for _ in range(30):
        times.observe(64, 3, 4.0)
    assert times.steps(64, 3) == pytest.approx(4.0, rel=0.02)


def test_what_turns_out_to_be_context_is_no_drafts_time() -> None:
    times = DraftTimes(is_padded=True)
    for _ in range(60):
        times.observe(64, 3, 0.5, context=20_000)
    times.take_out(1e-5)
    assert times.steps(64, 3) == pytest.approx(0.3, rel=0.02)
    # Captured steps draft all levels, whatever is verified of them.
    assert times.steps(64, 5) == times.steps(64, 3)
    assert times.steps(64, 1) < times.steps(64, 3)
    times.take_out(1.0)
    assert times.steps(64, 3) == 0.0


def test_captured_rows_are_few_and_reach_the_largest_tree() -> None:
    assert row_sizes(1, 32) == [1, 32]
    assert row_sizes(8, 32) == [1, 4, 8, 16, 32]
    assert row_sizes(64, 32) == [1, 2, 4, 8, 16, 32]
    assert row_sizes(64, 6) == [1, 2, 4, 6]
    assert row_sizes(8, 1) == [1]
    assert sum(len(row_sizes(batch, 32)) for batch in batch_sizes(64)) < 64


def test_what_a_token_of_context_takes_is_learnt_anew_by_the_first_long_contexts() -> None:
    """As a log of an H200 showed: a token takes one sequence longer than each of 32, and what was learnt of the one made plain steps of
    the others seem a fifth too slow, so that drafts that lost seemed to pay for seconds."""
    times = GridTimes({(1, 1): 4.1, (32, 1): 4.6})
    for context in range(1000, 20_000, 50):
        times.context = context
        times.observe(1, 1, 4.1 + 6e-5 * context)
    times.context = 60_000
    assert times.seconds(32, 1) > 1.1 * (4.6 + 3e-5 * 60_000)
    for _ in range(2):
        for _ in range(64):
            times.age()  # something was drafted
        times.observe(32, 1, 4.6 + 3e-5 * 60_000)
    assert times.seconds(32, 1) == pytest.approx(4.6 + 3e-5 * 60_000, rel=0.04)
    times.context = 1000  # and a short one says nothing of it
    times.observe(1, 1, 5.0)
    assert times.per_token == pytest.approx(3e-5, rel=0.15)
