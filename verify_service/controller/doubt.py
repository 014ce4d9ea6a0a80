"""Doubts estimates of acceptance: weighs whether they explain the newest outcomes, or a change."""

from collections import deque
from math import exp, inf, lgamma, log

from verify_service.controller.config import ControllerConfig


class Doubt:
    """Compares two explanations of the newest outcomes by Bayes' rule: chances are as estimated, or
    they changed within the newest steps, to any value.

    A change is expected once in `pool_memory` steps.

    Args:
        config: Numbers of the policy.

    Attributes:
        odds: Odds that chances changed.
        chance: Mean chance of a node since the likeliest change.
    """

    def __init__(self, config: ControllerConfig) -> None:
        self._config, self.odds, self.chance = config, 0.0, 0.0
        # Of each step: how many tries were right, how many wrong, how many expected to be right.
        self._newest: deque[tuple[float, float, float]] = deque(maxlen=config.near_steps)

    def record(self, right: float, wrong: float, expected: float) -> None:
        """Records the outcomes of a step, and how many were expected to be right."""
        self._newest.append((right, wrong, expected))
        # Looks for the step since which a change explains most, by the sums since each step.
        most, hits, misses, likely = -inf, 0.0, 0.0, 0.0
        for step in reversed(self._newest):
            hits, misses, likely = hits + step[0], misses + step[1], likely + step[2]
            known = min(max(likely / max(hits + misses, 1.0), 0.01), 0.99)
            # Logs of the outcomes' likelihoods: with any chance, all equally likely, and as known.
            changed = lgamma(hits + 1) + lgamma(misses + 1) - lgamma(hits + misses + 2)
            same = hits * log(known) + misses * log(1 - known)
            if changed - same > most:
                most, self.chance = changed - same, (hits + 1) / (hits + misses + 2)
        self.odds = exp(min(most, 50.0)) / self._config.pool_memory
