"""Errors cross gRPC whole, and those of other servers are understood."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from foredraft import errors
from foredraft.rpc.errors import DETAILS_KEY, from_rpc_error, internal_status, to_status


class FailedCall(grpc.RpcError):
    """A status as a client sees it, in the form of grpc.Call."""

    def __init__(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> None:
        self._parts = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._parts[2]


def received(status: status_pb2.Status) -> FailedCall:
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return FailedCall(code, status.message, ((DETAILS_KEY, status.SerializeToString()),))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest("top_p", "must be in (0, 1], not 2"), "INVALID_ARGUMENT"),
        (errors.PromptTooLong("prompt", "9 tokens, at most 8"), "INVALID_ARGUMENT"),
        (errors.Overloaded("512 requests wait", 2.5), "RESOURCE_EXHAUSTED"),
        (errors.Unavailable("the verifier is stopping"), "UNAVAILABLE"),
        (errors.AttachRefused("vocab_size", "9, not 8"), "FAILED_PRECONDITION"),
        (errors.DraftError("too late"), "UNAVAILABLE"),
        (errors.ConfigError("--port: no"), "FAILED_PRECONDITION"),
        (errors.CheckpointError("config.json is missing"), "FAILED_PRECONDITION"),
    ],
)
def test_every_error_crosses_the_wire_whole(error: errors.ForedraftError, code: str) -> None:
    call = received(to_status(error))
    assert call.code().name == code
    back = from_rpc_error(call)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_field_violations_are_what_google_rpc_says() -> None:
    status = to_status(errors.InvalidRequest("sampling.top_p", "must be in (0, 1]"))
    details = error_details_pb2.BadRequest()
    assert any(detail.Unpack(details) for detail in status.details)
    [violation] = details.field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", "must be in (0, 1]")


def test_an_unexpected_error_tells_only_a_request_id() -> None:
    status = internal_status("1234")
    assert "1234" in status.message
    assert isinstance(from_rpc_error(received(status)), errors.ForedraftError)


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", errors.Unavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", errors.Overloaded),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "SERVER: Received message larger than max (9 vs. 4)",
            errors.InvalidRequest,
        ),
        (grpc.StatusCode.INVALID_ARGUMENT, "no", errors.InvalidRequest),
        (grpc.StatusCode.UNIMPLEMENTED, "no such method", errors.ForedraftError),
    ],
)
def test_statuses_of_other_servers_are_understood(
    code: grpc.StatusCode, message: str, kind: type
) -> None:
    assert type(from_rpc_error(FailedCall(code, message))) is kind


def test_broken_details_are_ignored() -> None:
    call = FailedCall(grpc.StatusCode.UNAVAILABLE, "gone", ((DETAILS_KEY, b"\xff\xff\xff"),))
    assert type(from_rpc_error(call)) is errors.Unavailable


def test_a_broken_detail_among_others_is_ignored() -> None:
    status = to_status(errors.DraftError("too late"))
    status.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff")
    assert type(from_rpc_error(received(status))) is errors.DraftError
