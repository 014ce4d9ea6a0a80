"""Streams of a scripted verifier behind the real gateway process: what clients get, and what
clients that are slow, wait or leave do to them.
"""

import json
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.api.verify.v1 import verify_pb2
from testing import stack as stacks
from testing.scripted_verifier import Conversation, ScriptedVerifier, Submit, serving
from tests.gateway.scripted import BODY, LENGTH, TEXT, TOKENIZER, TOKENS, Rig, answer, nothing


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


def test_a_client_that_waits_is_not_one_that_takes_nothing(
    scripted_model: Path, tmp_path: Path
) -> None:
    async def script(talk: Conversation, submit: Submit) -> None:
        for token in TOKENS[:2]:
            await talk.say(submit.id, [token])
            await talk.wait(lambda: False, seconds=2.2)
        await talk.say(submit.id, reason=LENGTH, prompt_tokens=2, completion_tokens=2)

    verifier = ScriptedVerifier(scripted_model, TOKENIZER.vocab_size)
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
