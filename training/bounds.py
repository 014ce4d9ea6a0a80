"""Bounds of the sizes that a training run is given."""

from collections.abc import Mapping
from typing import Any

from foredraft.errors import ConfigError


def check_least(sizes: Any, least: Mapping[str, int], flags: Mapping[str, str]) -> None:
    """Raises ConfigError for the first size below its least value.

    Args:
        sizes: Object with the sizes as attributes.
        least: Least value of each attribute.
        flags: Flags of attributes with a name of their own.
    """
    for name, bound in least.items():
        value = getattr(sizes, name)
        if value < bound:
            flag = flags.get(name, "--" + name.replace("_", "-"))
            raise ConfigError(f"{flag} must be at least {bound}, not {value}")
