"""Times of steps at start, on a machine that others use."""

import itertools

from verify_service.executor.timing import best_of_rounds, without_waits


def test_what_waited_for_other_processes_at_start_is_taken_out() -> None:
    found = without_waits([0.010, 0.030, 0.013], [0.010, 0.011, 0.013], 1)
    assert found[0] == 0.010
    assert found[1] < 0.0125
    assert found[2] == 0.013


def test_the_shortest_run_of_each_shape_counts_once_all_are_warm() -> None:
    calls = itertools.count()
    seconds = [9.0, 9.0, 0.3, 0.5, 0.4, 0.2, *[0.6] * 20]  # the first of each warms up
    assert best_of_rounds(["a", "b"], lambda _: seconds[next(calls)]) == [0.3, 0.2]
