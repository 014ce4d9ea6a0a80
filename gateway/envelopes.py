"""Converts errors to response bodies in the shape of the API that was called."""

from typing import Any

from gateway import errors

ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def envelope(error: Exception, path: str) -> dict[str, Any]:
    """Returns the error body for an exception, in the shape that the path's API has."""
    return anthropic(error) if is_anthropic(path) else errors.envelope(error)


def envelope_of(status: int, message: str, path: str) -> dict[str, Any]:
    """Returns the error body for a status of a path without a route, or of a wrong method."""
    if is_anthropic(path):
        return _anthropic_of(status, message)
    return errors.envelope_of(errors.HttpError(status, "", "invalid_request_error"), message)


def is_anthropic(path: str) -> bool:
    """Returns whether a path belongs to Anthropic's API."""
    return path == ANTHROPIC or path.startswith(ANTHROPIC + "/")


def anthropic(error: Exception) -> dict[str, Any]:
    """Returns Anthropic's error object for an exception."""
    found = _anthropic_of(
        errors.http_error(error).status, errors.envelope(error)["error"]["message"]
    )
    if isinstance(error, errors.UnsupportedThread):
        # Anthropic's client sends whole conversations once it reads this.
        found["error"]["details"] = {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }
    return found


def _anthropic_of(status: int, message: str) -> dict[str, Any]:
    """Returns Anthropic's error object for a status code and a message."""
    other = "api_error" if status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(status, other)
    return {"type": "error", "error": {"type": kind, "message": message}}
