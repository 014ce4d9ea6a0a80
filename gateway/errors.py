"""Converts Foredraft's errors to HTTP answers in OpenAI's envelope."""

import math
from dataclasses import dataclass
from typing import Any

from foredraft.errors import (
    ForedraftError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unauthenticated,
    Unavailable,
)


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__(
            "model", f"the model {model[:100]!r} does not exist: this server has {served!r}"
        )


class UnknownResponse(InvalidRequest):
    """No response of this id is kept for the caller."""


class UnknownPrevious(UnknownResponse):
    """The response that a request continues is not kept for the caller."""


class UnsupportedThread(InvalidRequest):
    """The request begins or continues a conversation that an Anthropic server would keep."""


class BodyTooLarge(ForedraftError):
    """The HTTP body is over --max-body-bytes."""


class CrossSite(ForedraftError):
    """A page of another site has a browser send the request."""


class UnknownHost(ForedraftError):
    """The request calls the server by a name that --allowed-host does not give."""


class RequestTimeout(ForedraftError):
    """The request's deadline passed."""


class WaitedTooLong(Unavailable):
    """The request had no token after --max-queue-seconds."""


class RateLimited(Overloaded):
    """The caller has more running, asks or generates more than its key may."""


class SlowClient(ForedraftError):
    """The client reads so slowly that its buffer is full."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """The form of an error in HTTP and gRPC.

    Attributes:
        status: Status code.
        grpc: Name of the gRPC status code.
        kind: `type` of OpenAI's envelope.
        code: `code` of OpenAI's envelope.
        retryable: Whether the same request may succeed later.
    """

    status: int
    grpc: str
    kind: str
    code: str | None = None
    retryable: bool = False


# Subclasses stand before their base.
HTTP_ERRORS: tuple[tuple[type[ForedraftError], HttpError], ...] = (
    (UnknownModel, HttpError(404, "NOT_FOUND", "invalid_request_error", "model_not_found")),
    (
        UnknownPrevious,
        HttpError(404, "NOT_FOUND", "invalid_request_error", "previous_response_not_found"),
    ),
    (
        UnknownResponse,
        HttpError(404, "NOT_FOUND", "invalid_request_error", "response_not_found"),
    ),
    (
        PromptTooLong,
        HttpError(400, "INVALID_ARGUMENT", "invalid_request_error", "context_length_exceeded"),
    ),
    (InvalidRequest, HttpError(400, "INVALID_ARGUMENT", "invalid_request_error")),
    (BodyTooLarge, HttpError(413, "RESOURCE_EXHAUSTED", "invalid_request_error", "body_too_large")),
    (
        Unauthenticated,
        HttpError(401, "UNAUTHENTICATED", "invalid_request_error", "invalid_api_key"),
    ),
    (CrossSite, HttpError(403, "PERMISSION_DENIED", "invalid_request_error", "cross_site")),
    (
        UnknownHost,
        HttpError(403, "PERMISSION_DENIED", "invalid_request_error", "host_not_allowed"),
    ),
    (
        RateLimited,
        HttpError(
            429, "RESOURCE_EXHAUSTED", "rate_limit_error", "rate_limit_exceeded", retryable=True
        ),
    ),
    (
        Overloaded,
        HttpError(429, "RESOURCE_EXHAUSTED", "rate_limit_error", "overloaded", retryable=True),
    ),
    (
        WaitedTooLong,
        HttpError(503, "UNAVAILABLE", "server_error", "queue_timeout", retryable=True),
    ),
    (Unavailable, HttpError(503, "UNAVAILABLE", "server_error", "unavailable", retryable=True)),
    (RequestTimeout, HttpError(504, "DEADLINE_EXCEEDED", "server_error", "deadline_exceeded")),
    (SlowClient, HttpError(408, "RESOURCE_EXHAUSTED", "invalid_request_error", "slow_client")),
)
# The requests metric's labels of errors; those of the server's fault stand in monitoring/rules too.
OUTCOMES: tuple[tuple[type[Exception], str], ...] = (
    (InvalidRequest, "invalid"),
    (RateLimited, "rate_limited"),
    (Overloaded, "overloaded"),
    (WaitedTooLong, "queue_timeout"),
    (Unavailable, "unavailable"),
    (RequestTimeout, "deadline"),
    (SlowClient, "slow_client"),
    (Exception, "internal"),
)
_INTERNAL = HttpError(500, "INTERNAL", "server_error", "internal_error")


def http_error(error: Exception) -> HttpError:
    """Returns the HTTP form of an error; unexpected exceptions are status 500."""
    return next((http for kind, http in HTTP_ERRORS if isinstance(error, kind)), _INTERNAL)


def envelope(error: Exception) -> dict[str, Any]:
    """Returns OpenAI's error object, with `retryable` beside its fields.

    Unexpected errors reveal no details.
    """
    http = http_error(error)
    known = http is not _INTERNAL or isinstance(error, ForedraftError)
    field = error.field if isinstance(error, InvalidRequest) else None
    return envelope_of(http, str(error) if known else "internal error; the log has it", field)


def envelope_of(http: HttpError, message: str, field: str | None = None) -> dict[str, Any]:
    """Returns OpenAI's error object for the form of an error."""
    return {
        "error": {
            "message": message,
            "type": http.kind,
            "param": field,
            "code": http.code,
            "retryable": http.retryable,
        }
    }


def headers(error: Exception) -> dict[str, str]:
    """Returns an error's headers: Retry-After where a retry may help, WWW-Authenticate for 401."""
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, Overloaded):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_seconds)))}
    return {"retry-after": "1"} if isinstance(error, Unavailable) else {}


def outcome(error: BaseException) -> str:
    """Returns the error's `outcome` label in the requests metric."""
    return next((label for kind, label in OUTCOMES if isinstance(error, kind)), "cancelled")
