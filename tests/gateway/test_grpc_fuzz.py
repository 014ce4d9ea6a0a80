"""Any message at all to the public gRPC: a status that says what is wrong, never a defect, a hang
or something left behind.
"""

from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.cli.stack import LocalStack
from testing.rounds import rounds
from testing.stack import eventually, is_idle

FINE = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def scalars(field: Any) -> st.SearchStrategy[Any]:
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        return st.integers(max(low, -3), 20) | st.sampled_from([low, high])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.floats(-1, 3, width=32) | st.sampled_from([float("nan"), float("inf"), 1e30])
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from([value.number for value in field.enum_type.values])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    return st.text(max_size=30)


def values(field: Any) -> st.SearchStrategy[Any]:
    """Generates values of a field in the form that the message's constructor takes."""
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        key, value = (message.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(scalars(key), scalars(value), max_size=3)
    one = messages(message) if message is not None else scalars(field)
    return st.lists(one, max_size=4) if field.is_repeated else one


def messages(descriptor: Any) -> st.SearchStrategy[dict[str, Any]]:
    fields = {field.name: values(field) for field in descriptor.fields}
    return st.fixed_dictionaries({}, optional=fields)


@pytest.fixture(scope="module")
def stub(stack: LocalStack) -> Any:
    with grpc.insecure_channel(stack.urls["grpc"]) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


@settings(
    max_examples=rounds(60, 150),
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(fields=messages(inference_pb2.GenerateRequest.DESCRIPTOR))
def test_any_message(stub: Any, fields: dict[str, Any]) -> None:
    fields.pop("model", None)
    if "max_new_tokens" in fields.get("sampling", {}):
        # So that nothing runs for long.
        fields["sampling"]["max_new_tokens"] %= 9
    request = inference_pb2.GenerateRequest(**fields)
    code, why = grpc.StatusCode.OK, "none"
    try:
        list(stub.Generate(request, timeout=60))
    except grpc.RpcError as error:
        code, why = error.code(), error.details()  # type: ignore[attr-defined]
    assert code in FINE, (code, why, request)
    assert why


def test_nothing_is_left(http: httpx.Client) -> None:
    eventually(lambda: is_idle(http))
    assert http.get("/health").json()["status"] == "ok"
