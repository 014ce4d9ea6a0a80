"""Compares a route's list of request fields with its body and with the official client."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel

from tests.gateway.request_fields import Field

OF_CALLS = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


def check_listed(
    body: type[BaseModel], fields: Sequence[Field], method: Callable[..., Any], left_out: str
) -> None:
    """Asserts that a list names each field of a body once, and all that a client's method takes.

    Args:
        body: Body of the route.
        fields: The route's list.
        method: Method of the client.
        left_out: The client's parameter that is not listed.
    """
    names = [field.name for field in fields]
    assert len(names) == len(set(names))
    assert set(body.model_fields) == set(names)
    theirs = set(inspect.signature(method).parameters) - OF_CALLS - {left_out}
    assert theirs <= set(names)
