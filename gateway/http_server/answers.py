"""Answers that the server gives itself, without the application."""

import json
from collections.abc import Mapping
from http import HTTPStatus

from gateway import errors


def last_answer(status: HTTPStatus, envelope: object, headers: Mapping[str, str]) -> bytes:
    """Renders a whole HTTP/1.1 answer, after which the connection ends."""
    body = json.dumps(envelope).encode()
    head = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def error_answer(error: Exception) -> bytes:
    """Renders the whole answer for an error."""
    status = HTTPStatus(errors.http_error(error).status)
    return last_answer(status, errors.envelope(error), errors.headers(error))


def refusal(status: HTTPStatus, why: str) -> bytes:
    """Renders the answer to a request that is not valid HTTP/1.1."""
    error = {"message": why, "type": "invalid_request_error", "param": None, "code": None}
    return last_answer(status, {"error": {**error, "retryable": False}}, {})
