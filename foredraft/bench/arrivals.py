"""Due times of requests in an open loop: a Poisson process, or a burstier one, of constant or
growing rate.
"""

import math
from dataclasses import dataclass

import numpy as np

RAMPS = ("linear", "exponential")


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that grows from `start` to `end` requests per second while a stage's requests are
    sent.

    Attributes:
        strategy: linear or exponential in time.
    """

    strategy: str
    start: float
    end: float

    def due(self, operational: np.ndarray, total: float) -> np.ndarray:
        """Converts times of a process of rate 1 that lasts `total` to seconds, by the inverse
        of the mean count.

        The mean count up to t is `start t + (end - start) t^2 / 2T` for a linear ramp of T seconds,
        and `start T (r^(t/T) - 1) / ln r` with r = end / start for an exponential one; T makes it
        `total` at its end.
        """
        growth = self.end - self.start
        if growth == 0:
            return operational / self.start
        if self.strategy == "linear":
            seconds = 2 * total / (self.start + self.end)
            slope = growth / seconds
            # The root that is also right for falling rates; beyond the end the last rate goes on.
            inside = np.minimum(operational, total)
            root = np.sqrt(self.start**2 + 2 * slope * inside)
            times = 2 * inside / (self.start + root)
        else:
            log_ratio = math.log(self.end / self.start)
            seconds = total * log_ratio / growth
            inside = np.minimum(operational, total)
            times = seconds / log_ratio * np.log1p(inside * growth / (self.start * total))
        due: np.ndarray = times + np.maximum(operational - total, 0) / self.end
        return due


def arrival_times(
    count: int,
    rate: float,
    *,
    seed: int,
    burstiness: float = 1.0,
    ramp: Ramp | None = None,
) -> np.ndarray:
    """Returns the seconds from the start at which `count` requests are due, ascending; float64
    [count].

    The first is due after a gap, too, so that the mean rate is the one asked for.

    Args:
        rate: Requests per second; not used with a ramp. Infinite: all are due at once.
        burstiness: Shape of the gamma-distributed gaps: 1 is Poisson, less is burstier, more is
            steadier.
        ramp: Growth of the rate.
    """
    if ramp is None and math.isinf(rate):
        return np.zeros(count)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / burstiness, count)
    operational = np.cumsum(gaps)
    if ramp is None:
        return operational / rate
    return ramp.due(operational, float(count))
