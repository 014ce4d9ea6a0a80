"""What all request bodies have in common: how they arrive, within bounds, and are checked."""

import asyncio
import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from foredraft.errors import InvalidRequest, Unavailable
from gateway.errors import BodyTooLarge, SlowClient
from gateway.validation import MAX_NAME_CHARACTERS, invalid_request, without_idle_fields

T = TypeVar("T")

# Pydantic records every error, with some kilobytes for each: the first of millions of wrong items
# is enough.
Items = Annotated[list[T], Field(fail_fast=True)]
MAX_OBJECTS = 65_536
Objects = Annotated[list[T], Field(fail_fast=True, max_length=MAX_OBJECTS)]
BODIES_AT_A_TIME = 32  # number of largest bodies that may arrive at once
MAX_MEMBERS = 16_384  # of one object: pydantic records every unknown name and wrong value
# What numbers that are not finite have somewhere; texts may have it too.
_ODD_NUMBER = re.compile(rb"NaN|Infinity|\d[eE]\+?\d{3}|\d{309}")


class Body(BaseModel):
    """A request body: types as JSON has them, no NaN, and no field that would be silently left out.

    Attributes:
        remedies: What to send instead of fields that are not known here, by their names.
    """

    remedies: ClassVar[Mapping[str, str]] = {}
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Renamed:
    """A body whose fields have other names in the gateway."""

    def names(self) -> dict[str, str]:
        """Maps internal field names to this body's."""
        raise NotImplementedError

    def field(self, name: str) -> str:
        """Returns this body's name of an internal field."""
        return self.names().get(name, name)


B = TypeVar("B", bound=Body)


class Bounds:
    """Limits the size and the arrival time of request bodies, each and together.

    Args:
        body_bytes: Bytes of the largest body.
        seconds: Seconds in which a body must arrive.
    """

    def __init__(self, body_bytes: int, seconds: float) -> None:
        self.body_bytes = body_bytes
        self.seconds = seconds
        self.all_bytes = BODIES_AT_A_TIME * body_bytes  # sum of the bodies that are arriving
        self._arriving: dict[Arrival, None] = {}  # oldest first
        self._sum = 0
        self._refusal = ""  # of every body, once the server stops

    @contextlib.contextmanager
    def arriving(self, timeout: asyncio.Timeout) -> Iterator["Arrival"]:
        """Registers a body while it arrives; `timeout` can end its arrival."""
        arrival = Arrival(timeout)
        self._arriving[arrival] = None
        if self._refusal:
            arrival.give_up(self._refusal)
        try:
            yield arrival
        finally:
            del self._arriving[arrival]
            self._sum -= arrival.num_bytes

    def add(self, arrival: "Arrival", num_bytes: int) -> None:
        """Counts bytes of a body; if all bodies together exceed the limit, gives up the oldest."""
        arrival.num_bytes += num_bytes
        self._sum += num_bytes
        if self._sum > self.all_bytes:
            first = next((each for each in self._arriving if not each.refusal), None)
            if first is not None:
                first.give_up("the bodies of other requests need the room; try again in a second")

    def refuse_all(self, refusal: str) -> None:
        """Gives up the bodies that are arriving, and those that come later, as unavailable."""
        self._refusal = refusal
        for arrival in self._arriving:
            arrival.give_up(refusal)


class Arrival:
    """State of a body that is arriving.

    Attributes:
        num_bytes: Number of bytes that have come.
        refusal: Why the arrival was given up; empty while it goes on.
    """

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self.num_bytes = 0
        self.refusal = ""
        self._timeout = timeout

    def give_up(self, refusal: str) -> None:
        """Ends the arrival now."""
        self.refusal = refusal
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())


async def read(request: Request, model: type[B], bounds: Bounds) -> B:
    """Reads a request's body and validates it as a model.

    Raises:
        BodyTooLarge: The body exceeds `bounds.body_bytes`.
        SlowClient: The body did not arrive in time.
        Unavailable: Too many bodies arrive at a time.
        InvalidRequest: The body is not JSON, or a field is wrong; the error names the field.
    """
    max_bytes = bounds.body_bytes
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise InvalidRequest(
            "body", f"is encoded by {encoding[:40]!r}; only plain bodies are taken"
        )
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes:
        raise BodyTooLarge(f"the body has {length} bytes; at most {max_bytes} are taken")
    chunks: list[bytes] = []
    arrival = None
    try:
        async with asyncio.timeout(bounds.seconds) as timeout:
            with bounds.arriving(timeout) as arrival:
                async for chunk in request.stream():
                    bounds.add(arrival, len(chunk))
                    if arrival.num_bytes > max_bytes:
                        raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
                    chunks.append(chunk)
    except TimeoutError:
        if arrival is not None and arrival.refusal:
            raise Unavailable(arrival.refusal) from None
        raise SlowClient(f"the body did not arrive within {bounds.seconds:g} s") from None
    body = b"".join(chunks) or b"{}"
    found = _validated(body, model)
    _check_numbers(body)
    return found


def _validated(body: bytes, model: type[B]) -> B:
    """Validates a body as a model; see `read` for the errors."""
    _check_members(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        wrong = error
    if (asking := without_idle_fields(wrong, body)) is not None:
        try:
            return model.model_validate_json(asking)
        except ValidationError as error:
            wrong, body = error, asking
    raise invalid_request(wrong, body, model, model.remedies)


def _check_numbers(body: bytes) -> None:
    """Raises InvalidRequest for a number that JSON has not, or that no float holds, wherever it is:
    pydantic looks at fields for numbers alone, not into schemas and other free objects.
    """
    if not _ODD_NUMBER.search(body):
        return
    for path, part in _containers(from_json(body)):
        for name, value in _items(part):
            if isinstance(value, float) and not math.isfinite(value):
                where = ".".join((*path, _named(name)))
                raise InvalidRequest(where, "Input should be a finite number")


def _check_members(body: bytes) -> None:
    """Raises InvalidRequest where an object has more than MAX_MEMBERS members."""
    if body.count(b":") <= MAX_MEMBERS:
        return
    try:
        parsed = from_json(body)
    except ValueError:
        return  # validation says what is wrong with it
    for _, part in _containers(parsed):
        if isinstance(part, dict) and len(part) > MAX_MEMBERS:
            raise InvalidRequest(
                "body", f"has an object of {len(part)} members; at most {MAX_MEMBERS} are taken"
            )


def _containers(parsed: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields all objects and arrays of a parsed body, each with its path."""
    left: list[tuple[tuple[str, ...], Any]] = [((), parsed)]
    while left:
        path, part = left.pop()
        if isinstance(part, dict | list):
            yield path, part
            left.extend(
                ((*path, _named(name)), each)
                for name, each in _items(part)
                if isinstance(each, dict | list)
            )


def _items(part: dict[str, Any] | list[Any]) -> Iterable[tuple[Any, Any]]:
    return part.items() if isinstance(part, dict) else enumerate(part)


def _named(name: str | int) -> str:
    return str(name)[:MAX_NAME_CHARACTERS]


def refuse(values: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raises InvalidRequest for the first field that was given but cannot be honoured."""
    for field, reason in reasons.items():
        if values.get(field) not in (None, False, [], {}, ""):
            raise InvalidRequest(field, reason)
