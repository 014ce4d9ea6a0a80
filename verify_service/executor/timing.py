"""Times steps of several shapes at start."""

from collections.abc import Callable, Sequence
from typing import TypeVar

S = TypeVar("S")


def best_of_rounds(
    shapes: Sequence[S],
    run: Callable[[S], float],
    budget: float = 2.0,
    has_run: bool = False,
) -> list[float]:
    """The shortest of several runs of each shape, in rounds over all, so that a busy moment slows
    one of each at most.

    Args:
        run: Runs a step of a shape and gives its seconds.
        budget: Seconds after which no other round begins; there are five at most, after one that
            warms up.
        has_run: Whether each shape has run before, so that no round has to warm up.
    """
    for shape in () if has_run else shapes:
        run(shape)
    best = [run(shape) for shape in shapes]
    spent = sum(best)
    for _ in range(4):
        if spent > budget:
            break
        times = [run(shape) for shape in shapes]
        best = [min(pair) for pair in zip(best, times, strict=True)]
        spent += sum(times)
    return best


def without_waits(
    seconds: Sequence[float], cpu_seconds: Sequence[float], num_threads: int
) -> list[float]:
    """The same steps' seconds without what was spent waiting for other processes.

    Args:
        cpu_seconds: CPU time of all threads, the least that was seen of each step.
    """
    pairs = list(zip(seconds, cpu_seconds, strict=True))
    # The step that waited least shows what a second of CPU time takes; with several threads not
    # all work all the time.
    least = min(wall / cpu for wall, cpu in pairs) * num_threads
    return [min(wall, least * cpu) for wall, cpu in pairs]
