"""Errors name fields as the client wrote them."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from foredraft.errors import InvalidRequest


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Renames fields in errors raised in the block; `names` maps internal to client names."""
    with naming_by(lambda field: names.get(field, field)):
        yield


@contextlib.contextmanager
def naming_by(name: Callable[[str], str]) -> Iterator[None]:
    """Renames fields in errors raised in the block; `name` converts internal to client names."""
    try:
        yield
    except InvalidRequest as error:
        theirs = name(error.field)
        if theirs == error.field:
            raise
        raise type(error)(theirs, error.message) from error
