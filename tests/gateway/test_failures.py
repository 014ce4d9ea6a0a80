"""Tests failures of a verifier, which a scripted one produces behind the real gateway process."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.api.verify.v1 import verify_pb2
from foredraft.text.tokenizer import Tokenizer
from testing import stack as stacks
from testing import tiny_tokenizers
from testing.scripted_verifier import Conversation, ScriptedVerifier, Submit, serving
from testing.stack import metric

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
TEXT = "The dog sleeps."
TOKENS = TOKENIZER.encode(TEXT, False)
LENGTH, STOP = verify_pb2.FINISH_REASON_LENGTH, verify_pb2.FINISH_REASON_STOP
BODY = {"prompt": "x", "max_tokens": 50}


class Rig:
    """A gateway whose verifier can be given another script."""

    def __init__(self, verifier: ScriptedVerifier, http: str, grpc_address: str) -> None:
        self.verifier = verifier
        self.http = httpx.Client(base_url=http, timeout=30)
        self.channel = grpc.insecure_channel(grpc_address)
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)

    def is_ready(self) -> bool:
        return self.http.get("/health").status_code == 200

    def metric(self, line: str) -> float:
        return metric(self.http.get("/metrics").text, line)

    def stream(
        self, seen: threading.Event | None = None, **fields: Any
    ) -> tuple[str, dict[str, Any]]:
        """Returns the text of a streamed completion, and its last event; sets `seen` once text has
        come.
        """
        text, last = "", {}
        with self.http.stream(
            "POST", "/v1/completions", json={**BODY, **fields, "stream": True}
        ) as got:
            for line in got.iter_lines():
                if line and line != "data: [DONE]":
                    last = json.loads(line.removeprefix("data: "))
                    text += "".join(choice["text"] for choice in last.get("choices", []))
                    if text and seen is not None:
                        seen.set()
        return text, last


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scripted") / "model"
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), directory)
    return directory


@pytest.fixture(scope="module")
def shared(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    verifier = ScriptedVerifier(files, TOKENIZER.vocab_size)
    address = f"unix:{tmp_path_factory.mktemp('socket')}/v.sock"
    with serving(verifier, address), stacks.running_gateway(address) as addresses:
        rig = Rig(verifier, *addresses)
        stacks.eventually(rig.is_ready)
        yield rig
        rig.http.close()
        rig.channel.close()


@pytest.fixture
def rig(shared: Rig) -> Rig:
    shared.verifier.forget()
    stacks.eventually(shared.is_ready)
    return shared


async def answer(talk: Conversation, submit: Submit) -> None:
    """Answers token by token, then with the end."""
    for token in TOKENS:
        await talk.say(submit.id, [token])
    await talk.say(submit.id, reason=LENGTH, prompt_tokens=2, completion_tokens=len(TOKENS))


async def nothing(talk: Conversation, submit: Submit) -> None:
    """Never answers."""


def test_a_stream_that_breaks_before_the_first_token_is_tried_again(rig: Rig) -> None:
    retries = rig.metric("foredraft_gateway_retries_total")

    async def script(talk: Conversation, submit: Submit) -> None:
        if len(rig.verifier.submitted) == 1:
            await talk.end()
        else:
            await answer(talk, submit)

    rig.verifier.script = script
    assert rig.stream()[0] == TEXT
    first, second = rig.verifier.submitted
    assert first.sampling.seed == second.sampling.seed
    assert rig.metric("foredraft_gateway_retries_total") == retries + 1


def test_a_stream_that_breaks_later_ends_with_a_retryable_error(rig: Rig) -> None:
    seen = threading.Event()

    async def script(talk: Conversation, submit: Submit) -> None:
        await talk.say(submit.id, TOKENS[:2])
        await talk.wait(seen.is_set)
        await talk.end()

    rig.verifier.script = script
    text, last = rig.stream(seen)
    assert text == TOKENIZER.decode(TOKENS[:2])
    assert last["error"]["code"] == "unavailable"
    assert last["error"]["retryable"] is True
    stacks.eventually(rig.is_ready)
    seen.clear()
    asked = inference_pb2.GenerateRequest(text="x")
    with pytest.raises(grpc.RpcError) as lost:
        [seen.set() for _ in rig.stub.Generate(asked)]
    assert lost.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_an_answer_that_nobody_saw_survives_the_loss(rig: Rig) -> None:
    async def script(talk: Conversation, submit: Submit) -> None:
        if len(rig.verifier.submitted) == 1:
            await talk.say(submit.id, TOKENS[:2])
            await talk.end()
        else:
            await answer(talk, submit)

    rig.verifier.script = script
    reply = rig.http.post("/v1/completions", json=BODY).json()
    assert reply["choices"][0]["text"] == TEXT


def test_a_verifier_that_stops_is_asked_again(rig: Rig) -> None:
    async def script(talk: Conversation, submit: Submit) -> None:
        if len(rig.verifier.submitted) == 1:
            await talk.fail(submit.id, verify_pb2.ERROR_CODE_UNAVAILABLE)
        else:
            await answer(talk, submit)

    rig.verifier.script = script
    assert rig.stream()[0] == TEXT


@pytest.mark.parametrize(
    ("code", "fields", "status", "grpc_code"),
    [
        (
            verify_pb2.ERROR_CODE_OVERLOADED,
            {"retry_after_seconds": 2.5},
            429,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ),
        (
            verify_pb2.ERROR_CODE_INVALID_ARGUMENT,
            {"field": "max_new_tokens"},
            400,
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (verify_pb2.ERROR_CODE_INTERNAL, {}, 500, grpc.StatusCode.INTERNAL),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(
    rig: Rig, code: int, fields: dict[str, Any], status: int, grpc_code: Any, stream: bool
) -> None:
    async def script(talk: Conversation, submit: Submit) -> None:
        await talk.fail(submit.id, code, **fields)

    rig.verifier.script = script
    reply = rig.http.post("/v1/completions", json={**BODY, "stream": stream})
    assert reply.status_code == status
    assert reply.headers.get("retry-after") == ("3" if status == 429 else None)
    assert reply.json()["error"]["param"] == ("max_tokens" if status == 400 else None)
    with pytest.raises(grpc.RpcError) as refused:
        list(rig.stub.Generate(inference_pb2.GenerateRequest(text="x")))
    assert refused.value.code() == grpc_code  # type: ignore[attr-defined]


def test_no_event_holds_half_a_character(rig: Rig) -> None:
    word = "a🙂é𓀀b"
    tokens = TOKENIZER.encode(word, False)
    assert len(tokens) > len(word)

    async def script(talk: Conversation, submit: Submit) -> None:
        for token in tokens:
            await talk.say(submit.id, [token])
        await talk.say(submit.id, reason=LENGTH)

    rig.verifier.script = script
    with rig.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as got:
        lines = [line.removeprefix("data: ") for line in got.iter_lines() if line]
    pieces = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(pieces) == word
    assert not any("�" in piece for piece in pieces)


def test_a_stop_string_inside_a_block_cancels_and_counts_to_there(rig: Rig) -> None:
    tokens = TOKENIZER.encode("one two! three four", False)
    end = next(n for n in range(len(tokens)) if "!" in TOKENIZER.decode(tokens[:n]))

    async def script(talk: Conversation, submit: Submit) -> None:
        await talk.say(submit.id, tokens)  # a block that goes on behind the stop
        await talk.wait(lambda: submit.id in talk.cancelled)
        await talk.say(submit.id, tokens)
        await talk.say(
            submit.id, reason=verify_pb2.FINISH_REASON_CANCELLED, cached_tokens=1, prompt_tokens=2
        )

    rig.verifier.script = script
    reply = rig.http.post("/v1/completions", json={**BODY, "stop": "!"}).json()
    assert reply["choices"][0]["text"] == "one two"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == end
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    text, last = rig.stream(stop="!")
    assert text == "one two"
    assert last["choices"][0]["finish_reason"] == "stop"


def test_a_slow_client_is_dropped_and_nobody_else(rig: Rig) -> None:
    slow: list[int] = []

    async def script(talk: Conversation, submit: Submit) -> None:
        if submit.request_name != "slow":
            await answer(talk, submit)
            return
        slow.append(submit.id)
        for _ in range(50_000):
            if submit.id in talk.cancelled:
                return
            await talk.say(submit.id, TOKENS)
            await talk.breathe()

    rig.verifier.script = script
    where = urlsplit(str(rig.http.base_url))
    # SGLang's streams repeat the whole text each time, which fills the sockets soon.
    body = json.dumps({"text": "x", "rid": "slow", "stream": True}).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()  # noqa: E501
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((where.hostname, where.port))
        client.sendall(head + body)
        stacks.eventually(lambda: slow)
        assert rig.stream()[0] == TEXT
        stacks.eventually(lambda: slow[0] in rig.verifier.cancelled)
        assert rig.stream()[0] == TEXT
    stacks.eventually(lambda: rig.metric("foredraft_gateway_running_requests") == 0)


def test_a_verifier_that_hangs_is_given_up_at_the_deadline(rig: Rig) -> None:
    rig.verifier.script = nothing
    for seconds in (0.2, 2.0, 20.0):
        reply = rig.http.post("/v1/completions", json={**BODY, "timeout": seconds})
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "deadline_exceeded"
        if rig.verifier.submitted:  # on a busy machine it may not come so far
            break
    assert 0 < rig.verifier.submitted[0].timeout_seconds <= seconds
    stacks.eventually(lambda: rig.verifier.submitted[0].id in rig.verifier.cancelled)


def test_the_verifiers_word_on_the_deadline(rig: Rig) -> None:
    async def script(talk: Conversation, submit: Submit) -> None:
        await talk.say(submit.id, reason=verify_pb2.FINISH_REASON_DEADLINE)

    rig.verifier.script = script
    assert rig.http.post("/v1/completions", json=BODY).status_code == 504
    with pytest.raises(grpc.RpcError) as late:
        list(rig.stub.Generate(inference_pb2.GenerateRequest(text="x")))
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]


def test_a_client_that_goes_away_while_it_waits_is_cancelled(rig: Rig) -> None:
    rig.verifier.script = nothing
    where = urlsplit(str(rig.http.base_url))
    for number, stream in enumerate((False, True), 1):
        body = json.dumps({**BODY, "stream": stream})
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        )
        with socket.create_connection((where.hostname, where.port), timeout=30) as client:
            client.sendall(f"{head}\r\n{body}".encode())
            stacks.eventually(lambda number=number: len(rig.verifier.submitted) == number)
    call = rig.stub.Generate(inference_pb2.GenerateRequest(text="x"))
    stacks.eventually(lambda: len(rig.verifier.submitted) == 3)
    call.cancel()
    stacks.eventually(lambda: {s.id for s in rig.verifier.submitted} == set(rig.verifier.cancelled))
    assert rig.metric("foredraft_gateway_queued_requests") == 0


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/generate", "rid", {"text": "x"}),
        ("/v1/completions", "request_id", {"prompt": "x"}),
        ("/v1/chat/completions", "request_id", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_a_name_that_runs_cannot_be_taken(
    rig: Rig, path: str, field: str, body: dict[str, Any]
) -> None:
    may_end = threading.Event()

    async def script(talk: Conversation, submit: Submit) -> None:
        await talk.say(submit.id, TOKENS[:1])
        await talk.wait(may_end.is_set)
        await talk.say(submit.id, TOKENS[1:2], reason=LENGTH)

    rig.verifier.script = script
    body = {**body, field: "taken"}
    with rig.http.stream("POST", path, json={**body, "stream": True}) as first:
        lines = first.iter_lines()  # the connection is closed with it
        next(lines)
        second = rig.http.post(path, json=body)
        assert second.status_code == 400
        assert second.json()["error"]["param"] == field
        with pytest.raises(grpc.RpcError) as third:
            list(rig.stub.Generate(inference_pb2.GenerateRequest(text="x", request_id="taken")))
        assert third.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        assert len(rig.verifier.submitted) == 1
        may_end.set()
        assert "data: [DONE]" in list(lines)
    assert rig.http.post(path, json=body).status_code == 200


def test_two_verifiers_and_a_drain(files: Path, tmp_path: Path) -> None:
    one, two = (ScriptedVerifier(files, TOKENIZER.vocab_size) for _ in range(2))
    release = threading.Event()

    async def breaks(talk: Conversation, submit: Submit) -> None:
        await talk.end()

    async def slowly(talk: Conversation, submit: Submit) -> None:
        await talk.say(submit.id, TOKENS[:1])
        await talk.wait(release.is_set)
        await talk.say(submit.id, TOKENS[1:], reason=LENGTH)

    one.script, two.script = breaks, answer
    places = [f"unix:{tmp_path}/{name}" for name in ("one", "two")]
    with contextlib.ExitStack() as running:
        for verifier, place in ((one, places[0]), (two, places[1])):
            running.enter_context(serving(verifier, place))
        http, grpc_address = running.enter_context(stacks.running_gateway(*places))
        rig = Rig(two, http, grpc_address)
        stacks.eventually(lambda: rig.metric("foredraft_gateway_verifiers") == 2)
        stacks.eventually(rig.is_ready)
        for _ in range(6):
            assert rig.stream()[0] == TEXT
        assert one.submitted
        assert len(two.submitted) == 6
        one.script = two.script = slowly
        with rig.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as got:
            lines = got.iter_lines()
            next(lines)
            process = stacks.gateway_processes[-1]
            process.terminate()
            stacks.eventually(lambda: httpx.get(http + "/health", timeout=60).status_code == 503)
            refused = httpx.post(http + "/v1/completions", json=BODY, timeout=60)
            assert refused.status_code == 503
            release.set()
            rest = [
                json.loads(line.removeprefix("data: "))
                for line in lines
                if line.startswith("data: {")
            ]
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0


def test_a_client_that_waits_is_not_one_that_takes_nothing(files: Path, tmp_path: Path) -> None:
    async def script(talk: Conversation, submit: Submit) -> None:
        for token in TOKENS[:2]:
            await talk.say(submit.id, [token])
            await talk.wait(lambda: False, seconds=2.2)
        await talk.say(submit.id, reason=LENGTH, prompt_tokens=2, completion_tokens=2)

    verifier = ScriptedVerifier(files, TOKENIZER.vocab_size)
    verifier.script = script
    address = f"unix:{tmp_path}/v.sock"
    with (
        serving(verifier, address),
        stacks.running_gateway(address, client_timeout=1.0) as (url, where),
        grpc.insecure_channel(where) as channel,
    ):
        stacks.eventually(lambda: httpx.get(url + "/health", timeout=60).status_code == 200)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        chunks = list(stub.Generate(inference_pb2.GenerateRequest(text="x")))
    assert "".join(chunk.text for chunk in chunks) == TOKENIZER.decode(TOKENS[:2])
