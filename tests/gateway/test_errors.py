"""Errors as HTTP and the metrics say them: every kind its own status, and nothing of what nobody
foresaw.
"""

import asyncio

import pytest

from foredraft import errors as common
from gateway import errors

# kind: status, code, Retry-After, label of the metric
SAID: dict[BaseException, tuple[int, str | None, str | None, str]] = {
    errors.UnknownModel("x", "y"): (404, "model_not_found", None, "invalid"),
    common.PromptTooLong("prompt", "x"): (400, "context_length_exceeded", None, "invalid"),
    common.InvalidRequest("top_p", "x"): (400, None, None, "invalid"),
    errors.BodyTooLarge("x"): (413, "body_too_large", None, "internal"),
    common.Unauthenticated("x"): (401, "invalid_api_key", None, "internal"),
    errors.CrossSite("x"): (403, "cross_site", None, "internal"),
    errors.UnknownHost("x"): (403, "host_not_allowed", None, "internal"),
    errors.RateLimited("x", 2.1): (429, "rate_limit_exceeded", "3", "rate_limited"),
    common.Overloaded("x", 0.2): (429, "overloaded", "1", "overloaded"),
    common.Overloaded("x", 0.0): (429, "overloaded", "1", "overloaded"),
    errors.WaitedTooLong("x"): (503, "queue_timeout", "1", "queue_timeout"),
    common.Unavailable("x"): (503, "unavailable", "1", "unavailable"),
    errors.RequestTimeout("x"): (504, "deadline_exceeded", None, "deadline"),
    errors.SlowClient("x"): (408, "slow_client", None, "slow_client"),
    common.ForedraftError("x"): (500, "internal_error", None, "internal"),
    ValueError("a secret"): (500, "internal_error", None, "internal"),
}


@pytest.mark.parametrize("error", SAID, ids=lambda error: type(error).__name__)
def test_every_kind_is_said_in_its_own_way(error: Exception) -> None:
    status, code, retry_after, label = SAID[error]
    http, said = errors.http_error(error), errors.envelope(error)["error"]
    assert (http.status, said["code"]) == (status, code)
    assert errors.headers(error).get("retry-after") == retry_after
    assert said["retryable"] == (retry_after is not None)
    assert said["param"] == getattr(error, "field", None)
    assert errors.outcome(error) == label


def test_who_lacks_a_key_is_told_how_to_send_it() -> None:
    assert errors.headers(common.Unauthenticated("x")) == {"www-authenticate": "Bearer"}


def test_only_what_was_raised_on_purpose_is_told() -> None:
    assert errors.envelope(common.ForedraftError("why"))["error"]["message"] == "why"
    assert "secret" not in str(errors.envelope(ValueError("a secret")))


def test_a_client_that_goes_away_is_no_error() -> None:
    assert errors.outcome(asyncio.CancelledError()) == "cancelled"
    assert errors.outcome(GeneratorExit()) == "cancelled"
