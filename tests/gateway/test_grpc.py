"""The public gRPC against the running stack, by generated stubs and by reflection alone."""

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.cli.stack import LocalStack
from foredraft.text.tokenizer import Tokenizer
from testing import tiny_tokenizers
from testing.stack import CONTEXT_LENGTH, eventually, is_idle

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
TEXT = "The quick brown fox"
SERVICE = "foredraft.api.inference.v1.InferenceService"


@pytest.fixture(scope="module")
def channel(stack: LocalStack) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(stack.urls["grpc"]) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> inference_pb2_grpc.InferenceServiceStub:
    return inference_pb2_grpc.InferenceServiceStub(channel)


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    """Builds a request from its JSON form."""
    sampling = {"temperature": 0.8, "seed": 7, "max_new_tokens": 30, **fields.pop("sampling", {})}
    return json_format.ParseDict(
        {"text": TEXT, "sampling": sampling, **fields}, inference_pb2.GenerateRequest()
    )


def collected(stream: Any) -> tuple[str, list[inference_pb2.Token], inference_pb2.Completion]:
    responses = list(stream)
    text = "".join(response.text for response in responses)
    tokens = [token for response in responses for token in response.tokens]
    assert not any(response.HasField("completion") for response in responses[:-1])
    return text, tokens, responses[-1].completion


def test_equals_http(stub: Any, http: httpx.Client) -> None:
    body = {
        "text": TEXT,
        "sampling_params": {"temperature": 0.8, "sampling_seed": 7, "max_new_tokens": 30},
    }
    expected = http.post("/generate", json=body).json()
    text, tokens, completion = collected(stub.Generate(request()))
    assert text == expected["text"] == "".join(token.text for token in tokens)
    assert [token.id for token in tokens] == expected["output_ids"]
    assert completion.completion_tokens == len(tokens)
    assert completion.prompt_tokens == expected["meta_info"]["prompt_tokens"]
    assert completion.seed == 7
    assert completion.speculation.verify_steps > 0


def test_every_form_of_prompt(stub: Any) -> None:
    text = collected(stub.Generate(request()))[0]
    ids = request()
    ids.token_ids.ids.extend(TOKENIZER.encode(TEXT))
    assert collected(stub.Generate(ids))[0] == text
    chat = request()
    chat.chat.messages.add(role="user", content="Hi")
    completion = collected(stub.Generate(chat))[2]
    templated = Tokenizer(
        tiny_tokenizers.byte_level(), {"bos_token": "<s>"}, tiny_tokenizers.CHAT_TEMPLATE
    ).encode_chat([{"role": "user", "content": "Hi"}])
    assert completion.prompt_tokens == len(templated)


def test_a_long_name_of_a_model_is_cut(stub: Any) -> None:
    """Details of a status travel as headers, which have little room."""
    with pytest.raises(grpc.RpcError) as unknown:
        list(stub.Generate(request(model="m" * 50_000)))
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    assert "'tiny'" in str(unknown.value)


def test_a_role_that_the_template_does_not_know_is_refused(stub: Any) -> None:
    asked = request(chat={"messages": [{"role": "wizard", "content": "ab"}]}, text=None)
    with pytest.raises(grpc.RpcError, match=r"chat\.messages\.0\.role: must be 'system'"):
        list(stub.Generate(asked))


def test_a_message_can_be_continued(stub: Any, http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ab a"}]
    asked = request(chat={"messages": messages, "continueFinalMessage": True}, text=None)
    body = {"messages": messages, "continue_final_message": True, "seed": 7, "max_tokens": 30}
    expected = http.post("/v1/chat/completions", json={**body, "temperature": 0.8}).json()
    text, _, end = collected(stub.Generate(asked))
    assert text == expected["choices"][0]["message"]["content"]
    assert end.prompt_tokens == expected["usage"]["prompt_tokens"]
    asked.chat.messages.pop()
    with pytest.raises(grpc.RpcError, match=r"chat\.continue_final_message: the last message"):
        list(stub.Generate(asked))


def test_provenance_and_log_probabilities(stub: Any) -> None:
    asked = request(
        text="ab ab ab ab", return_provenance=True, sampling={"logprobs": 2, "max_new_tokens": 60}
    )
    collected(stub.Generate(asked))
    _, tokens, completion = collected(stub.Generate(asked))
    drafted = [token for token in tokens if token.provenance == inference_pb2.PROVENANCE_DRAFT]
    assert len(drafted) == completion.speculation.accepted_tokens > 0
    assert all(token.provenance for token in tokens)
    assert all(len(token.alternatives) == 2 and token.logprob <= 0 for token in tokens)
    _, plain, _ = collected(stub.Generate(request()))
    assert not any(token.provenance or token.HasField("logprob") for token in plain)


def test_forbidden_tokens(stub: Any) -> None:
    (word,) = TOKENIZER.encode("q", add_special_tokens=False)
    forced = {"logit_bias": {word: 100}, "max_new_tokens": 6}
    assert {token.id for token in collected(stub.Generate(request(sampling=forced)))[1]} == {word}
    asked = request(sampling={**forced, "bad_words": ["q"]})
    assert word not in {token.id for token in collected(stub.Generate(asked))[1]}
    asked = request(sampling={"allowed_token_ids": [66, 67], "max_new_tokens": 6})
    assert {token.id for token in collected(stub.Generate(asked))[1]} <= {66, 67}


def test_choices_and_stop(stub: Any) -> None:
    texts = {0: "", 1: ""}
    for response in stub.Generate(request(sampling={"n": 2})):
        texts[response.index] += response.text
    assert texts[0] != texts[1]
    whole = collected(stub.Generate(request()))[0]
    spans = (whole[i : i + 3] for i in range(5, len(whole) - 3))
    stop = next(span for span in spans if "�" not in span)
    text, _, completion = collected(stub.Generate(request(sampling={"stop": [stop]})))
    assert text == whole[: whole.index(stop)]
    assert completion.stop_text == stop
    assert completion.finish_reason == inference_pb2.FINISH_REASON_STOP


def test_models(stub: Any) -> None:
    models = stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert [(model.id, model.context_length) for model in models] == [("tiny", CONTEXT_LENGTH)]
    info = stub.GetModelInfo(inference_pb2.GetModelInfoRequest(model="tiny"))
    assert info.speculative_algorithm == "NGRAM"
    assert info.has_chat_template
    for ask in (
        lambda: stub.GetModelInfo(inference_pb2.GetModelInfoRequest(model="other")),
        lambda: list(stub.Generate(request(model="other"))),
    ):
        with pytest.raises(grpc.RpcError) as unknown:
            ask()
        status = rpc_status.from_call(unknown.value)
        assert status is not None
        assert status.code == grpc.StatusCode.NOT_FOUND.value[0]
        info, details = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        assert status.details[0].Unpack(info)
        assert status.details[1].Unpack(details)
        assert info.reason == "MODEL_NOT_FOUND"
        assert details.field_violations[0].field == "model"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"temperature": "NaN"}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"max_new_tokens": 0}}, "sampling.max_new_tokens"),
        ({"sampling": {"max_new_tokens": 100_000}}, "sampling.max_new_tokens"),
        ({"sampling": {"n": 0}}, "sampling.n"),
        ({"sampling": {"n": 1000}}, "sampling.n"),
        ({"sampling": {"stop": [""]}}, "sampling.stop"),
        ({"sampling": {"stop_token_ids": [100_000]}}, "sampling.stop_token_ids"),
        ({"sampling": {"logit_bias": {"100000": 1.0}}}, "sampling.logit_bias"),
        ({"sampling": {"logprobs": 21}}, "sampling.logprobs"),
        ({"speculation": {"num_steps": 0}}, "speculation.num_steps"),
        ({"speculation": {"topk": 2000}}, "speculation.topk"),
        ({"speculation": {"num_draft_tokens": 0}}, "speculation.num_draft_tokens"),
        ({"text": "x" * 100_000}, "text"),
    ],
)
def test_refusals_name_the_field(stub: Any, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(request(**fields)))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    status = rpc_status.from_call(refused.value)
    assert status is not None
    details = error_details_pb2.BadRequest()
    assert any(detail.Unpack(details) for detail in status.details)
    assert details.field_violations[0].field == field


@pytest.mark.parametrize("kind", ["nothing", "no messages", "no tokens", "unknown token"])
def test_wrong_prompts(stub: Any, kind: str) -> None:
    asked = request()
    asked.ClearField("prompt")
    if kind == "no messages":
        asked.chat.SetInParent()
    elif kind == "no tokens":
        asked.token_ids.SetInParent()
    elif kind == "unknown token":
        asked.token_ids.ids.append(4_000_000_000)
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(asked))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        ({"messages": 65_537}, "chat.messages"),
        ({"messages": 1, "calls": 65_536}, "chat.messages"),
        ({"messages": 1, "functions": 129}, "chat.functions"),
    ],
)
def test_empty_messages_by_the_thousand(stub: Any, chat: dict[str, int], field: str) -> None:
    """They take two bytes each on the wire, and far more here."""
    found = inference_pb2.ChatMessages(
        messages=[inference_pb2.ChatMessage()] * chat["messages"],
        functions=[inference_pb2.Function()] * chat.get("functions", 0),
    )
    found.messages[0].calls.extend([inference_pb2.FunctionCall()] * chat.get("calls", 0))
    with pytest.raises(grpc.RpcError, match=f"{field}: at most") as refused:
        list(stub.Generate(inference_pb2.GenerateRequest(chat=found)))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_deadline_and_cancellation_free_the_place(stub: Any, http: httpx.Client) -> None:
    long = request(sampling={"max_new_tokens": 480, "ignore_eos": True, "n": 8})
    with pytest.raises(grpc.RpcError) as late:
        list(stub.Generate(long, timeout=0.1))
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    eventually(lambda: is_idle(http))
    call = stub.Generate(long)
    next(call)
    call.cancel()
    eventually(lambda: is_idle(http))


def test_health(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_client_that_knows_reflection_alone(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert SERVICE in database.get_services()
    pool = descriptor_pool.DescriptorPool(database)
    method = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
    kinds = [
        message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type)
    ]
    call = channel.unary_stream(
        f"/{SERVICE}/Generate",
        request_serializer=kinds[0].SerializeToString,
        response_deserializer=kinds[1].FromString,
    )
    asked = kinds[0](text=TEXT)
    asked.sampling.max_new_tokens = 3
    assert sum(len(response.tokens) for response in call(asked)) <= 3


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_in_both_versions(channel: grpc.Channel, version: str) -> None:
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    listed, described = ask(iter(asked))
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, f"grpc.reflection.{version}.ServerReflection"} <= names
    assert described.file_descriptor_response.file_descriptor_proto


HALF = r'{"const": "\ud83d"}'  # of a character
HALF_TAGS = r'{"structures": [{"begin": "\ud83d"}], "triggers": ["\ud83d"]}'


@pytest.mark.parametrize(
    ("functions", "grammar", "field"),
    [
        ([HALF], {}, "chat.functions"),
        (['{"maximum": NaN}'], {}, "chat.functions"),
        ([], {"json_schema": HALF}, "sampling.grammar"),
        (["{}"], {"json_schema": HALF}, "sampling.grammar"),
        (["{}"], {"structural_tag": HALF_TAGS}, "sampling.grammar"),
    ],
)
def test_json_that_has_half_a_character_is_refused(
    tool_gateway: tuple[str, str], functions: list[str], grammar: dict[str, str], field: str
) -> None:
    asked = inference_pb2.GenerateRequest()
    asked.chat.messages.add(role="user", content="Hi")
    for parameters in functions:
        asked.chat.functions.add(name="f", parameters=parameters)
    for kind, text in grammar.items():
        setattr(asked.sampling.grammar, kind, text)
    with grpc.insecure_channel(tool_gateway[1]) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(asked))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert refused.value.details().startswith(f"{field}: ")  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["Generate", "ListModels"])
def test_bytes_that_are_no_message(channel: grpc.Channel, method: str) -> None:
    made = channel.unary_stream if method == "Generate" else channel.unary_unary
    call: Any = made(f"/{SERVICE}/{method}")
    with pytest.raises(grpc.RpcError) as refused:
        list(call(b"\xff\xff\xff"))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert "no message" in refused.value.details()  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_bytes_in_a_stream_that_are_no_message(channel: grpc.Channel, version: str) -> None:
    call: Any = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    )
    with pytest.raises(grpc.RpcError) as refused:
        list(call(iter([b"\xff\xff\xff"])))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert "no message" in refused.value.details()  # type: ignore[attr-defined]


@pytest.mark.parametrize("algorithm", list(grpc.Compression))
def test_compressed_calls(stack: LocalStack, algorithm: grpc.Compression) -> None:
    with grpc.insecure_channel(stack.urls["grpc"], compression=algorithm) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        found = [
            "".join(r.text for r in stub.Generate(request(), compression=each))
            for each in (None, algorithm)
        ]
    assert found[0] == found[1]


def test_large_metadata_is_refused(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(request(), metadata=(("x-large", "a" * 100_000),)))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
