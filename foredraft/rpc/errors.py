"""Foredraft's errors as gRPC statuses with google.rpc details, and back.

The only place that knows both sides.
"""

import contextlib

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from foredraft.errors import (
    AttachRefused,
    CheckpointError,
    ConfigError,
    DraftError,
    ForedraftError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unauthenticated,
    Unavailable,
)

DOMAIN = "foredraft"
DETAILS_KEY = "grpc-status-details-bin"

# Subclasses stand before their base.
_CODES: tuple[tuple[type[ForedraftError], str, int], ...] = (
    (PromptTooLong, "PROMPT_TOO_LONG", code_pb2.INVALID_ARGUMENT),
    (InvalidRequest, "INVALID_REQUEST", code_pb2.INVALID_ARGUMENT),
    (Overloaded, "OVERLOADED", code_pb2.RESOURCE_EXHAUSTED),
    (Unavailable, "UNAVAILABLE", code_pb2.UNAVAILABLE),
    (Unauthenticated, "UNAUTHENTICATED", code_pb2.UNAUTHENTICATED),
    (AttachRefused, "ATTACH_REFUSED", code_pb2.FAILED_PRECONDITION),
    (DraftError, "DRAFT_ERROR", code_pb2.UNAVAILABLE),
    (ConfigError, "CONFIG_ERROR", code_pb2.FAILED_PRECONDITION),
    (CheckpointError, "CHECKPOINT_ERROR", code_pb2.FAILED_PRECONDITION),
    (ForedraftError, "INTERNAL", code_pb2.INTERNAL),
)
_STATUS_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}


def to_status(
    error: ForedraftError, reason: str = "", code: int | None = None
) -> status_pb2.Status:
    """Converts an error that was raised on purpose to a status.

    ErrorInfo is always set, BadRequest and RetryInfo where they apply.

    Args:
        error: An error of `foredraft.errors`, or of a class derived from these.
        reason: Reason for ErrorInfo, where a service's own class has another than its base class.
        code: Number of google.rpc.Code, where a service's own class has another.
    """
    usual, number = next(
        (usual, number) for kind, usual, number in _CODES if isinstance(error, kind)
    )
    reason, code = reason or usual, number if code is None else code
    status = status_pb2.Status(code=code, message=str(error))
    _add_detail(status, error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    if isinstance(error, InvalidRequest | AttachRefused):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        _add_detail(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded | Unavailable):
        seconds = error.retry_after_seconds if isinstance(error, Overloaded) else 1.0
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(seconds * 1e9))
        _add_detail(status, retry)
    return status


def internal_status(request_id: str) -> status_pb2.Status:
    """Returns the status of an unexpected exception.

    Details are only in the log, under the request id.
    """
    status = status_pb2.Status(
        code=code_pb2.INTERNAL, message=f"internal error; the log has it under request {request_id}"
    )
    _add_detail(status, error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN))
    _add_detail(status, error_details_pb2.RequestInfo(request_id=request_id))
    return status


async def abort(context: grpc.aio.ServicerContext, status: status_pb2.Status) -> None:
    """Ends a call of grpc.aio with a status and its details; raises, as `context.abort` does."""
    await context.abort(
        _STATUS_BY_NUMBER[status.code],
        status.message,
        ((DETAILS_KEY, status.SerializeToString()),),
    )


def from_rpc_error(error: grpc.RpcError) -> ForedraftError:
    """Returns the error that a failed call stands for, raised by a Foredraft peer or by gRPC."""
    code, message = error.code(), error.details() or ""
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in _details_of(error):
        for kind in (info, bad_request, retry):
            with contextlib.suppress(DecodeError):  # a peer's defect must not hide its error
                detail.Unpack(kind)
    violation = next(iter(bad_request.field_violations), None)
    field = violation.field if violation else "request"
    text = violation.description if violation else message
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT if info.reason == "PROMPT_TOO_LONG":
            return PromptTooLong(field, text)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(field, text)
        # gRPC's own word for a message over the limit: trying again would never help.
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in message:
            return InvalidRequest("request", message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            if not retry.HasField("retry_delay"):
                return Overloaded(message)
            return Overloaded(message, retry.retry_delay.ToNanoseconds() / 1e9)
        case grpc.StatusCode.UNAVAILABLE if info.reason == "DRAFT_ERROR":
            return DraftError(message)
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(message)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(message)
        case grpc.StatusCode.FAILED_PRECONDITION if violation:
            return AttachRefused(field, text)
        case grpc.StatusCode.FAILED_PRECONDITION if info.reason == "CONFIG_ERROR":
            return ConfigError(message)
        case grpc.StatusCode.FAILED_PRECONDITION if info.reason == "CHECKPOINT_ERROR":
            return CheckpointError(message)
    return ForedraftError(f"{code.name}: {message}")


def _add_detail(status: status_pb2.Status, message: Message) -> None:
    detail = any_pb2.Any()
    detail.Pack(message)
    status.details.append(detail)


def _details_of(error: grpc.RpcError) -> list[any_pb2.Any]:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
            except DecodeError:
                return []
            return list(status.details)
    return []
