"""Limits of a caller, of all callers together, and of what one request may ask for."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.api.verify.v1 import verify_pb2
from foredraft.cli.stack import LocalStack
from foredraft.config.api_keys import Limits
from foredraft.telemetry.metrics import value
from foredraft.text.tokenizer import Tokenizer
from gateway.errors import RateLimited
from gateway.security.limits import Bucket, Caller, acting_for, current_caller
from testing import stack as stacks
from testing import tiny_tokenizers
from testing.api_keys import SECRETS, bearer, write_keys
from testing.scripted_verifier import Conversation, ScriptedVerifier, Submit, serving
from testing.stack import eventually, metric

LONG = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "ab", "max_tokens": 4, "ignore_eos": True}


class Held:
    """A gateway whose verifier gives one token of each request and waits."""

    def __init__(self, place: str, url: str, grpc_address: str) -> None:
        self.place = place  # the verifier's address
        self.web = httpx.Client(base_url=url, timeout=30)
        self.grpc_address = grpc_address

    @contextlib.contextmanager
    def running(self, name: str, **fields: Any) -> Iterator[None]:
        """Opens a stream and waits for its first token."""
        body = {**LONG, **fields}
        with self.web.stream("POST", "/v1/completions", json=body, headers=bearer(name)) as got:
            assert got.status_code == 200
            lines = got.iter_lines()  # the connection is closed with it
            next(lines)
            yield

    @property
    def page(self) -> str:
        return self.web.get("/metrics", headers=bearer("dave")).text

    def ask(self, name: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return self.web.post(path, json=fields or SHORT, headers=bearer(name))


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    directory = tmp_path_factory.mktemp("held")
    tokenizer = tiny_tokenizers.byte_level()
    tiny_tokenizers.save(tokenizer, directory / "model")
    known = Tokenizer(tokenizer)
    verifier = ScriptedVerifier(directory / "model", known.vocab_size)
    words = known.encode("The dog sleeps.", False)

    async def script(talk: Conversation, submit: Submit) -> None:
        if submit.request_name == "starved":
            await talk.wait(lambda: submit.id in talk.cancelled)
        await talk.say(submit.id, words)
        if submit.sampling.max_new_tokens > 10:
            await talk.wait(lambda: submit.id in talk.cancelled)
        await talk.say(submit.id, words[:1], reason=verify_pb2.FINISH_REASON_LENGTH)

    verifier.script = script
    place = f"unix:{directory}/v.sock"
    key_file = write_keys(directory / "keys")
    flags = {"api_key_file": key_file, "max_concurrent_requests": 3, "max_queue_seconds": 3.0}
    with serving(verifier, place), stacks.running_gateway(place, **flags) as addresses:
        held = Held(place, *addresses)
        eventually(lambda: held.web.get("/health").status_code == 200)
        yield held
        held.web.close()


def test_concurrent_requests(held: Held) -> None:
    refused = 'foredraft_gateway_refused_requests_total{key="alice",limit="concurrent"}'
    before = metric(held.page, refused)
    everything = {"abort_all": True}
    with held.running("alice"):
        answer = held.ask("alice")
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert "alice" in answer.json()["error"]["message"]
        # Looking and aborting are free, and what one aborts is one's own; others have limits of
        # their own.
        assert held.web.get("/v1/models", headers=bearer("alice")).status_code == 200
        assert held.ask("dave").status_code == 200
        assert held.ask("dave", "/abort_request", **everything).json() == {"aborted": 0}
        with grpc.insecure_channel(held.grpc_address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            metadata = (("authorization", f"Bearer {SECRETS['alice']}"),)
            with pytest.raises(grpc.RpcError) as full:
                list(stub.Generate(inference_pb2.GenerateRequest(text="ab"), metadata=metadata))
        assert full.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        status = rpc_status.from_call(full.value)
        assert status is not None
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.seconds == 1
        assert held.ask("alice", "/abort_request", **everything).json() == {"aborted": 1}
    eventually(lambda: held.ask("alice").status_code == 200)
    assert metric(held.page, refused) >= before + 2


def test_a_name_belongs_to_its_caller(held: Held) -> None:
    with held.running("dave", request_id="mine"):
        assert held.ask("carol", **SHORT, request_id="mine").status_code == 200
        charged = 'foredraft_gateway_key_tokens_total{key="dave",kind="prompt"}'
        before = metric(held.page, charged)
        again = held.ask("dave", **SHORT, request_id="mine")
        assert again.json()["error"]["param"] == "request_id"
        assert metric(held.page, charged) == before > 0
        assert held.ask("carol", "/abort_request", rid="mine").json() == {"aborted": 0}
        assert held.ask("dave", "/abort_request", rid="mine").json() == {"aborted": 1}


def test_limits_of_all_together(held: Held) -> None:
    with held.running("dave"), held.running("dave"), held.running("dave"):
        full = held.ask("carol")
        assert full.status_code == 429
        assert full.headers["retry-after"] == "1"
        assert full.json()["error"] == {
            "message": "as many requests run as --max-concurrent-requests allows (3); try again in"
            " 1 s",
            "type": "rate_limit_error",
            "param": None,
            "code": "overloaded",
            "retryable": True,
        }
        assert held.web.get("/v1/models", headers=bearer("dave")).status_code == 200
        with grpc.insecure_channel(held.grpc_address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            metadata = (("authorization", f"Bearer {SECRETS['dave']}"),)
            with pytest.raises(grpc.RpcError) as busy:
                list(stub.Generate(inference_pb2.GenerateRequest(text="ab"), metadata=metadata))
        assert busy.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    eventually(lambda: held.ask("dave").status_code == 200)


def test_connections_that_all_work(held: Held) -> None:
    with stacks.running_gateway(held.place, max_connections=2) as addresses:
        small = Held(held.place, *addresses)
        eventually(lambda: httpx.get(f"{addresses[0]}/health", timeout=60).status_code == 200)
        with small.running("dave"), small.running("dave"):
            with httpx.Client(base_url=addresses[0], timeout=30) as other:
                full = other.get("/health")
            assert full.status_code == 503
            assert full.headers["retry-after"] == "1"
            assert full.headers["connection"] == "close"
            error = full.json()["error"]
            assert "connections of your address are in use" in error["message"]
            assert error["retryable"]
        eventually(lambda: httpx.get(f"{addresses[0]}/health", timeout=60).status_code == 200)


def test_half_sent_requests_take_no_place(held: Held) -> None:
    where = urlsplit(str(held.web.base_url))
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer"
        f" {SECRETS['dave']}\r\n"
    )
    with contextlib.ExitStack() as opened:
        for _ in range(5):
            connection = socket.create_connection((where.hostname, where.port), timeout=30)
            opened.enter_context(contextlib.closing(connection))
            connection.sendall(head.encode() + b"content-length: 1000\r\n\r\n{")
        for _ in range(3):
            assert held.ask("dave").status_code == 200


def test_a_request_that_gets_no_place(held: Held) -> None:
    starved = held.ask("dave", **SHORT, request_id="starved")
    assert starved.status_code == 503
    assert starved.headers["retry-after"] == "1"
    assert starved.json()["error"]["code"] == "queue_timeout"
    outcome = 'foredraft_gateway_requests_total{outcome="queue_timeout"}'
    eventually(lambda: metric(held.page, outcome) == 1)
    with grpc.insecure_channel(held.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        asked = inference_pb2.GenerateRequest(text="ab", request_id="starved")
        metadata = (("authorization", f"Bearer {SECRETS['dave']}"),)
        with pytest.raises(grpc.RpcError) as late:
            list(stub.Generate(asked, metadata=metadata))
    assert late.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    status = rpc_status.from_call(late.value)
    assert status is not None
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)


PROMPTS = ["ab"] * 12
SAMPLING = {"max_new_tokens": 8, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**SHORT, "prompt": PROMPTS, "max_tokens": 8}),
        ("/v1/completions", {**SHORT, "prompt": PROMPTS, "max_tokens": 8, "stream": True}),
        ("/generate", {"text": PROMPTS, "sampling_params": SAMPLING}),
        ("/generate", {"text": PROMPTS, "sampling_params": SAMPLING, "stream": True}),
        ("/v1/completions", {**SHORT, "max_tokens": 8, "n": 12}),
    ],
)
def test_several_prompts_are_charged_together(
    held: Held, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    with stacks.running_gateway(
        held.place, api_key_file=write_keys(tmp_path / "keys")
    ) as addresses:
        limited = Held(held.place, *addresses)
        eventually(lambda: limited.web.get("/health").status_code == 200)
        # They are more than carol's minute; a full bucket lets them through once.
        assert limited.ask("carol", path, **body).status_code == 200
        again = limited.ask("carol", path, **body)
        assert again.status_code == 429
        # What they took is missing now, and is more than comes in a minute.
        assert int(again.headers["retry-after"]) > 60
        refused = 'foredraft_gateway_refused_requests_total{key="carol",limit="tokens"}'
        assert metric(limited.page, refused) == 1
        limited.web.close()


def test_lengths(model: Path, stack: LocalStack) -> None:
    verifier = next(service.health for service in stack.services if service.name == "verify")
    flags = {"max_prompt_tokens": 8, "max_output_tokens": 30}
    with (
        stacks.running_gateway(verifier, **flags) as (url, _),
        httpx.Client(base_url=url, timeout=60) as web,
    ):
        eventually(lambda: web.get("/health").status_code == 200)
        too_long = web.post("/v1/completions", json={**SHORT, "prompt": [5] * 9})
        assert too_long.status_code == 400
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        too_many = web.post("/v1/completions", json={**SHORT, "max_tokens": 31})
        assert too_many.json()["error"]["param"] == "max_tokens"
        native = {"text": "ab", "sampling_params": {"ignore_eos": True}}
        # What nobody asked for is cut; SGLang's default is 128.
        assert web.post("/generate", json=native).json()["meta_info"]["completion_tokens"] == 30


def test_a_pool_smaller_than_the_context_is_the_limit(model: Path) -> None:
    with (
        stacks.running_stack(model, max_total_tokens=128, speculative_algorithm="NONE") as small,
        httpx.Client(base_url=small.urls["http"], timeout=60) as web,
    ):
        assert web.get("/v1/models").json()["data"][0]["max_model_len"] == 129
        body = {**SHORT, "prompt": [5] * 100, "max_tokens": 29}
        fits = web.post("/v1/completions", json=body).json()
        assert fits["usage"]["completion_tokens"] == 29
        error = web.post("/v1/completions", json={**body, "max_tokens": 30}).json()["error"]
        assert error["param"] == "max_tokens"
        assert "maximum context length is 129 tokens, with the output: 29 are left" in str(error)


def test_bucket() -> None:
    now = 0.0
    bucket = Bucket(60, lambda: now)
    assert bucket.take(60) == 0
    assert bucket.take(30) == pytest.approx(30)
    now = 29.0
    assert bucket.take(30) == pytest.approx(1)
    now = 30.0
    assert bucket.take(30) == 0
    bucket.give_back(10)
    assert bucket.take(11) == pytest.approx(1)
    assert bucket.take(10) == 0
    now = 1000.0
    assert bucket.take(100) == 0, "more than a minute's worth passes a full bucket"
    assert bucket.take(1) == pytest.approx(41)
    assert Bucket(0).take(1e9) == 0


def test_a_caller_pays_for_what_was_generated() -> None:
    now = 0.0

    def spent(kind: str) -> float:
        return value("foredraft_gateway_key_tokens_total", key="payer", kind=kind)

    caller = Caller("payer", Limits(tokens=100), lambda: now)
    with caller.charge(10, 60) as charge:
        charge.num_tokens = 15
        with pytest.raises(RateLimited, match=r"100 tokens a minute; try again in 1 s"):
            caller.charge(1, 30).__enter__()
    assert (spent("prompt"), spent("output")) == (10, 15)
    with pytest.raises(RateLimited), caller.charge(10, 66):
        pass
    with contextlib.suppress(ZeroDivisionError), caller.charge(10, 65) as charge:
        charge.num_tokens = 1
        raise ZeroDivisionError
    with caller.charge(0, 64):
        pass
    assert (spent("prompt"), spent("output")) == (20, 16)


def test_a_place_is_given_back_however_a_request_ends() -> None:
    caller = Caller("", Limits(concurrent=1))
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError), caller.running():
            with pytest.raises(RateLimited, match="all clients together"), caller.running():
                pass
            raise ZeroDivisionError


def test_who_is_refused_takes_no_place() -> None:
    caller = Caller("", Limits(concurrent=2, requests=1), lambda: 0.0)
    with caller.running():
        pass
    for _ in range(3):
        with pytest.raises(RateLimited, match="1 request a minute;"), caller.running():
            pass
    caller.change(Limits(concurrent=2))
    with caller.running(), caller.running():
        pass


def test_requests_act_for_their_caller_and_nobody_after_them() -> None:
    alice, bob = Caller("alice", Limits()), Caller("bob", Limits())
    with acting_for(alice):
        with acting_for(bob):
            assert current_caller() is bob
        assert current_caller() is alice
    assert current_caller().name == ""


def test_callers_keep_their_counts_when_limits_change() -> None:
    caller = Caller("a", Limits(concurrent=2, tokens=10), lambda: 0.0)
    with caller.charge(2, 8) as charge:
        charge.num_tokens = 8
    caller.change(Limits(concurrent=1, tokens=10))
    assert caller._tokens.take(1) > 0
    with caller.running(), pytest.raises(Exception, match="limit"), caller.running():
        pass
