"""Arrivals against the laws that they are to follow."""

import numpy as np
import pytest
from scipy import stats

from foredraft.bench.arrivals import Ramp, arrival_times


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_gaps_are_exponential_and_independent(rate: float) -> None:
    times = arrival_times(20_000, rate, seed=3)
    gaps = np.diff(times, prepend=0.0)
    assert stats.kstest(gaps, "expon", args=(0, 1 / rate)).pvalue > 0.01
    # No memory: a long gap says nothing of the next one.
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02


def test_counts_of_intervals_are_poisson() -> None:
    rate, width = 8.0, 0.5
    times = arrival_times(40_000, rate, seed=11)
    counts = np.bincount((times[times < times[-1] // width * width] / width).astype(int))
    kinds = np.arange(0, 11)
    observed = [np.sum(counts == kind) for kind in kinds[:-1]] + [np.sum(counts >= kinds[-1])]
    law = stats.poisson(rate * width)
    expected = np.append(law.pmf(kinds[:-1]), law.sf(kinds[-1] - 1)) * len(counts)
    assert stats.chisquare(observed, expected).pvalue > 0.01


@pytest.mark.parametrize("burstiness", [0.3, 4.0])
def test_burstiness_keeps_the_rate(burstiness: float) -> None:
    gaps = np.diff(arrival_times(20_000, 5.0, seed=5, burstiness=burstiness), prepend=0.0)
    assert np.mean(gaps) == pytest.approx(0.2, rel=0.05)
    # The squared coefficient of variation of a gamma distribution is one over its shape.
    assert np.var(gaps) / np.mean(gaps) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


@pytest.mark.parametrize(
    ("ramp", "rate_at"),
    [
        (Ramp("linear", 2.0, 20.0), lambda x: 2.0 + 18.0 * x),
        (Ramp("linear", 0.0, 10.0), lambda x: 10.0 * x),
        (Ramp("linear", 20.0, 2.0), lambda x: 20.0 - 18.0 * x),
        (Ramp("exponential", 1.0, 16.0), lambda x: 16.0**x),
        (Ramp("linear", 7.0, 7.0), lambda x: 7.0 + 0 * x),
    ],
    ids=["linear", "from nothing", "falling", "exponential", "level"],
)
def test_ramps_have_the_rate_they_say(ramp: Ramp, rate_at) -> None:
    count = 20_000
    times = arrival_times(count, np.inf, seed=7, ramp=ramp)
    assert np.all(np.diff(times) >= 0)
    # The mean count by numerical integration: through it the arrivals become a process of rate 1.
    x = np.linspace(0, 1, 200_001)
    rates = rate_at(x)
    shape = np.concatenate([[0], np.cumsum((rates[1:] + rates[:-1]) / 2 * np.diff(x))])
    length = count / shape[-1]
    inside = times[times < length]
    operational = np.interp(inside / length, x, shape * length)
    assert stats.kstest(np.diff(operational, prepend=0.0), "expon").pvalue > 0.01
    assert len(inside) == pytest.approx(count, rel=0.03)


def test_without_a_rate_all_are_due_at_once_and_seeds_repeat() -> None:
    assert not arrival_times(5, np.inf, seed=1).any()
    assert np.array_equal(arrival_times(50, 3.0, seed=2), arrival_times(50, 3.0, seed=2))
    assert not np.array_equal(arrival_times(50, 3.0, seed=2), arrival_times(50, 3.0, seed=3))
