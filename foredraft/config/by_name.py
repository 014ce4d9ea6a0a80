"""Reads values of flags that may differ between algorithms: NAME=VALUE,NAME=VALUE."""

import re
from collections.abc import Sequence

from foredraft.config.algorithms import ALGORITHMS
from foredraft.errors import ConfigError

_NEXT_NAME = re.compile(rf"(?:^|,)({'|'.join(ALGORITHMS)})=", re.IGNORECASE)


def is_by_name(text: str) -> bool:
    """Returns whether a value names algorithms."""
    return bool(_NEXT_NAME.match(text))


def value_of(text: str, algorithm: str) -> str:
    """Returns the value that NAME=VALUE,NAME=VALUE has for an algorithm, "" for none; any other
    text is the value for all.
    """
    if not is_by_name(text):
        return text
    _, *parts = _NEXT_NAME.split(text)
    values = {_known_as(name): value for name, value in zip(parts[::2], parts[1::2], strict=True)}
    return values.get(algorithm, "")


def check_names(flag: str, text: str, algorithms: Sequence[str]) -> None:
    """Raises ConfigError where a value NAME=VALUE,NAME=VALUE has a name twice, or one of no
    algorithm that drafts.
    """
    names = [_known_as(name) for name in _NEXT_NAME.findall(text)] if is_by_name(text) else []
    if len(set(names)) < len(names):
        raise ConfigError(f"{flag} {text}: each name may be given once")
    for name in names:
        if name not in algorithms:
            raise ConfigError(
                f"{flag} {text}: {name} is not among --speculative-algorithm {','.join(algorithms)}"
            )


def _known_as(name: str) -> str:
    return "EAGLE" if name.upper() == "NEXTN" else name.upper()
