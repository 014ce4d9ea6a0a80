"""Tests failures of a verifier, which a scripted one produces behind the real gateway process."""

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from foredraft.api.inference.v1 import inference_pb2
from foredraft.api.verify.v1 import verify_pb2
from testing import stack as stacks
from testing.scripted_verifier import Conversation, ScriptedVerifier, Submit, serving
from tests.gateway.scripted import BODY, LENGTH, TEXT, TOKENIZER, TOKENS, Rig, answer, nothing


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


def test_text_that_comes_with_a_failure_is_streamed(rig: Rig) -> None:
    async def script(talk: Conversation, submit: Submit) -> None:
        code = verify_pb2.ERROR_CODE_INVALID_ARGUMENT
        await talk.fail(submit.id, code, tokens=TOKENS, field="grammar")

    rig.verifier.script = script
    text, last = rig.stream()
    assert text == TEXT
    assert last["error"]["param"] == "structured_outputs"
    assert rig.http.post("/v1/completions", json=BODY).status_code == 400


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


def test_a_key_pays_for_no_tokens_that_were_lost(scripted_model: Path, tmp_path: Path) -> None:
    verifier = ScriptedVerifier(scripted_model, TOKENIZER.vocab_size)

    async def script(talk: Conversation, submit: Submit) -> None:
        if len(verifier.submitted) == 1:
            await talk.say(submit.id, TOKENS[:2])
            await talk.end()
        else:
            await answer(talk, submit)

    verifier.script = script
    place = f"unix:{tmp_path}/verifier"
    with (
        serving(verifier, place),
        stacks.running_gateway(place, api_key="secret") as (http, grpc_address),
    ):
        rig = Rig(verifier, http, grpc_address)
        rig.http.headers["authorization"] = "Bearer secret"
        stacks.eventually(rig.is_ready)
        reply = rig.http.post("/v1/completions", json=BODY).json()
        assert reply["choices"][0]["text"] == TEXT
        assert len(verifier.submitted) == 2
        paid = rig.metric('foredraft_gateway_key_tokens_total{key="default",kind="output"}')
        assert paid == len(TOKENS)


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


def test_two_verifiers_and_a_drain(scripted_model: Path, tmp_path: Path) -> None:
    one, two = (ScriptedVerifier(scripted_model, TOKENIZER.vocab_size) for _ in range(2))
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
