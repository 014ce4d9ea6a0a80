"""API keys and their limits, over HTTP and gRPC, against running services; their secrets stay secret."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.api.verify.v1 import verify_pb2
from foredraft.cli.stack import LocalStack
from foredraft.errors import ConfigError
from foredraft.text.tokenizer import Tokenizer
from gateway.security import keys
from gateway.security.limits import Bucket, Caller, Limits
from tests.support import stack as stacks
from tests.support import tiny_tokenizers
from tests.support.scripted_verifier import Conversation, ScriptedVerifier, Submit, serving
from tests.support.stack import eventually

SECRETS = {name: f"{name}-0123456789abcdef" for name in ("main", "alice", "bob", "carol", "dave")}
LONG = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "ab", "max_tokens": 4, "ignore_eos": True}


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {SECRETS[name]}"}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    digest = hashlib.sha256(SECRETS["dave"].encode()).hexdigest()
    path.write_text(
        "# name secret limits\n"
        f"alice {SECRETS['alice']} concurrent=1\n"
        f"bob {SECRETS['bob']} requests=2   # two a minute\n\n"
        f"carol {SECRETS['carol']} tokens=60\n"
        f"dave sha256:{digest}\n"
    )
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What the services log."""
    return []


@pytest.fixture(scope="module")
def guarded(model: Path, key_file: Path, lines: list[str]) -> Iterator[LocalStack]:
    flags = {"api_key": SECRETS["main"], "api_key_file": str(key_file), "log_level": "debug"}
    with stacks.running_stack(model, lines, **flags) as running:
        yield running


@pytest.fixture(scope="module")
def web(guarded: LocalStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.urls["http"], timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def stub(guarded: LocalStack) -> Iterator[Any]:
    with grpc.insecure_channel(guarded.urls["grpc"]) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def metric(web: httpx.Client, line: str) -> float:
    rows = web.get("/metrics").text.splitlines()
    return sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith(line + " "))


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer wrong", "Basic main", SECRETS["main"], "Bearer é\x80"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/nothing", "/openapi.json"])
def test_without_a_known_key(web: httpx.Client, path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    method = "POST" if path == "/v1/completions" else "GET"
    answer = web.request(method, path, headers=headers, content=b"{" if method == "POST" else None)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


@pytest.mark.parametrize("name", ["main", "dave"])
def test_with_a_key(guarded: LocalStack, web: httpx.Client, name: str) -> None:
    with openai.OpenAI(
        base_url=guarded.urls["http"] + "/v1", api_key=SECRETS[name], max_retries=0
    ) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        used = client.completions.create(
            model="tiny", prompt="ab", max_tokens=4, extra_body={"ignore_eos": True}
        ).usage
    assert used is not None
    label = "default" if name == "main" else name
    counted = 'foredraft_gateway_key_tokens_total{key="%s",kind="%s"}'
    assert metric(web, counted % (label, "output")) == used.completion_tokens == 4
    assert metric(web, counted % (label, "prompt")) == used.prompt_tokens
    lowered = {"authorization": f"bearer  {SECRETS[name]}"}
    assert web.get("/v1/models", headers=lowered).status_code == 200


def test_openai_says_what_is_wrong(guarded: LocalStack) -> None:
    url = guarded.urls["http"] + "/v1"
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="not known"),
    ):
        client.models.list()


def test_what_is_open(web: httpx.Client) -> None:
    for path in ("/health", "/metrics", "/", "/dashboard", "/dashboard/figures", "/web/api.js"):
        assert web.get(path).status_code == 200, path
    for path in ("/health_generate", "/get_server_info", "/metrics/", "/web"):
        assert web.get(path).status_code == 401, path


def test_grpc(guarded: LocalStack, stub: Any) -> None:
    asked = inference_pb2.GenerateRequest(text="ab")
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "x"),)):
        for call in (
            lambda metadata=metadata: list(stub.Generate(asked, metadata=metadata)),
            lambda metadata=metadata: stub.ListModels(
                inference_pb2.ListModelsRequest(), metadata=metadata
            ),
            lambda metadata=metadata: stub.GetModelInfo(
                inference_pb2.GetModelInfoRequest(), metadata=metadata
            ),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    metadata = (("authorization", f"Bearer {SECRETS['main']}"),)
    assert list(stub.Generate(asked, metadata=metadata))[-1].completion.completion_tokens
    with grpc.insecure_channel(guarded.urls["grpc"]) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


class Held:
    """A gateway whose verifier gives one token of each request and waits."""

    def __init__(self, url: str, grpc_address: str) -> None:
        self.web = httpx.Client(base_url=url, timeout=30)
        self.grpc_address = grpc_address

    @contextlib.contextmanager
    def running(self, name: str, **fields: Any) -> Iterator[None]:
        """A stream whose first token has come."""
        body = {**LONG, **fields}
        with self.web.stream("POST", "/v1/completions", json=body, headers=bearer(name)) as got:
            assert got.status_code == 200
            lines = got.iter_lines()  # the connection is closed with it
            next(lines)
            yield

    def ask(self, name: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return self.web.post(path, json=fields or SHORT, headers=bearer(name))


@pytest.fixture(scope="module")
def held(key_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
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
    flags = {"api_key_file": key_file, "max_concurrent_requests": 3, "max_queue_seconds": 1.0}
    with serving(verifier, place), stacks.running_gateway(place, **flags) as addresses:
        held = Held(*addresses)
        eventually(lambda: held.web.get("/health").status_code == 200)
        yield held
        held.web.close()


def test_concurrent_requests(held: Held) -> None:
    refused = 'foredraft_gateway_refused_requests_total{key="alice",limit="concurrent"}'
    before = metric(held.web, refused)
    everything = {"abort_all": True}
    with held.running("alice"):
        answer = held.ask("alice")
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert "alice" in answer.json()["error"]["message"]
        # Looking and aborting are free, and what one aborts is one's own; others have limits of their own.
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
    assert metric(held.web, refused) >= before + 2


def test_a_name_belongs_to_its_caller(held: Held) -> None:
    with held.running("dave", request_id="mine"):
        assert held.ask("carol", **SHORT, request_id="mine").status_code == 200
        again = held.ask("dave", **SHORT, request_id="mine")
        assert again.json()["error"]["param"] == "request_id"
        assert held.ask("carol", "/abort_request", rid="mine").json() == {"aborted": 0}
        assert held.ask("dave", "/abort_request", rid="mine").json() == {"aborted": 1}


def test_limits_of_all_together(held: Held) -> None:
    with held.running("dave"), held.running("dave"), held.running("dave"):
        full = held.ask("carol")
        assert full.status_code == 503
        assert full.headers["retry-after"] == "1"
        assert full.json()["error"]["retryable"]
        assert held.web.get("/v1/models", headers=bearer("dave")).status_code == 200
        with grpc.insecure_channel(held.grpc_address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            metadata = (("authorization", f"Bearer {SECRETS['dave']}"),)
            with pytest.raises(grpc.RpcError) as busy:
                list(stub.Generate(inference_pb2.GenerateRequest(text="ab"), metadata=metadata))
        assert busy.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    eventually(lambda: held.ask("dave").status_code == 200)


def test_a_request_that_gets_no_place(held: Held) -> None:
    starved = held.ask("dave", **SHORT, request_id="starved")
    assert starved.status_code == 503
    assert starved.headers["retry-after"] == "1"
    assert starved.json()["error"]["code"] == "queue_timeout"
    outcome = 'foredraft_gateway_requests_total{outcome="queue_timeout"}'
    eventually(lambda: metric(held.web, outcome) == 1)
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


def test_requests_a_minute(web: httpx.Client) -> None:
    # What is refused for its content counts, too: it costs work.
    assert web.post("/v1/completions", content=b"{", headers=bearer("bob")).status_code == 400
    assert web.post("/v1/completions", json=SHORT, headers=bearer("bob")).status_code == 200
    refused = web.post("/v1/completions", json=SHORT, headers=bearer("bob"))
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 30


def test_tokens_a_minute(web: httpx.Client) -> None:
    def ask(**fields: Any) -> httpx.Response:
        return web.post("/v1/completions", json={**SHORT, **fields}, headers=bearer("carol"))

    # The whole of what may come is reserved, and what did not come is given back.
    stopped = ask(max_tokens=50, stop_token_ids=list(range(600)), ignore_eos=False)
    assert stopped.json()["usage"]["completion_tokens"] == 1
    assert ask(max_tokens=40).status_code == 200
    refused = ask(max_tokens=40)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert ask(max_tokens=5).status_code == 200


def test_the_key_file_is_followed(web: httpx.Client, key_file: Path, lines: list[str]) -> None:
    old = key_file.read_text()
    key_file.write_text(old + "eve eve-0123456789abcdef\n")
    new = {"authorization": "Bearer eve-0123456789abcdef"}
    eventually(lambda: web.get("/v1/models", headers=new).status_code == 200)
    key_file.write_text("one\n")
    eventually(lambda: any("stay as they were" in line for line in lines))
    assert web.get("/v1/models", headers=new).status_code == 200
    key_file.write_text(old)
    eventually(lambda: web.get("/v1/models", headers=new).status_code == 401)
    assert web.get("/v1/models", headers=bearer("dave")).status_code == 200


def test_secrets_are_nowhere(guarded: LocalStack, web: httpx.Client, lines: list[str]) -> None:
    web.post("/v1/completions", content=b"{", headers=bearer("main"))
    web.get("/v1/models", headers={"authorization": f"Bearer {SECRETS['main']}x"})
    pages = web.get("/metrics").text + web.get("/dashboard/figures").text
    commands = "".join(part for service in guarded.services for part in service.command)
    everything = "\n".join([*lines, pages, commands])
    assert not [secret for secret in SECRETS.values() if secret in everything]
    pids = {state.name: state.pid for state in guarded.states()}
    for name, pid in pids.items():
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
        assert (SECRETS["main"] in environment) == (name == "gateway")
        assert SECRETS["main"] not in Path(f"/proc/{pid}/cmdline").read_text()


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


def test_callers_keep_their_counts_when_limits_change() -> None:
    caller = Caller("a", Limits(concurrent=2, tokens=10), lambda: 0.0)
    with caller.charge(2, 8) as charge:
        charge.num_tokens = 8
    caller.change(Limits(concurrent=1, tokens=10))
    assert caller._tokens.take(1) > 0
    with caller.running(), pytest.raises(Exception, match="limit"), caller.running():
        pass


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "name\n",
        "na/me secret\n",
        "a x\na y\n",
        "a x\nb x\n",
        "a sha256:12\n",
        "a x concurrent\n",
        "a x concurrent=-1\n",
        "a x speed=1\n",
        "a é\n",
        "a " + "x" * 600 + "\n",
    ],
)
def test_bad_files(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        keys.read_file(path, Limits())
    assert "x" * 600 not in str(error.value)
    os.chmod(path, 0o644)
    assert "chmod 600" in caplog.text


def test_a_secret_and_its_digest_are_one_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"a x\nb sha256:{hashlib.sha256(b'x').hexdigest()}\n")
    with pytest.raises(ConfigError, match="same secret"):
        keys.read_file(path, Limits())
