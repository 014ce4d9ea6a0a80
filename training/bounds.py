"""Bounds of the sizes that a training run is given."""

import math
from collections.abc import Mapping
from typing import Any

from foredraft.config.options import flag_of
from foredraft.errors import ConfigError

MAX_SEED = 2**32 - 1  # seeds of steps and batches are made of it, within 64 bits


def check_least(sizes: Any, least: Mapping[str, int], flags: Mapping[str, str]) -> None:
    """Raises ConfigError for the first size that is not at least its least value, as NaN is not.

    Args:
        sizes: Object with the sizes as attributes.
        least: Least value of each attribute.
        flags: Flags of attributes with a name of their own.
    """
    for name, bound in least.items():
        value = getattr(sizes, name)
        if not value >= bound:
            flag = flags.get(name, flag_of(name))
            raise ConfigError(f"{flag} must be at least {bound}, not {value}")


def check_seed_and_rate(seed: int, lr: float) -> None:
    """Raises ConfigError for a seed or a learning rate that no run can have."""
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"--seed must be in [0, {MAX_SEED}], not {seed}")
    if not 0 < lr < math.inf:
        raise ConfigError(f"--lr must be a number above 0, not {lr:g}")
