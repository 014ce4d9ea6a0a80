"""API keys over HTTP and gRPC, against running services; their secrets stay secret."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.cli.stack import LocalStack
from foredraft.config import api_keys as keys
from foredraft.config.api_keys import Limits
from foredraft.config.services import GatewayConfig
from foredraft.errors import ConfigError
from gateway.security.gate import Gate
from gateway.security.http import GateMiddleware
from gateway.security.limits import Caller
from testing import stack as stacks
from testing.api_keys import SECRETS, bearer, write_keys
from testing.stack import eventually, metric

SHORT = {"prompt": "ab", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_keys(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Returns the lines that the services log."""
    return []


@pytest.fixture(scope="module")
def guarded(model: Path, key_file: Path, lines: list[str]) -> Iterator[LocalStack]:
    flags = {"api_key": SECRETS["main"], "api_key_file": str(key_file), "log_level": "debug"}
    with stacks.running_stack(model, lines, is_forked=False, **flags) as running:
        yield running


@pytest.fixture(scope="module")
def web(guarded: LocalStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.urls["http"], timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def stub(guarded: LocalStack) -> Iterator[Any]:
    with grpc.insecure_channel(guarded.urls["grpc"]) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


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
    assert (
        metric(web.get("/metrics", headers=bearer("main")).text, counted % (label, "output"))
        == used.completion_tokens
        == 4
    )
    assert (
        metric(web.get("/metrics", headers=bearer("main")).text, counted % (label, "prompt"))
        == used.prompt_tokens
    )
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
    for path in ("/health", "/", "/dashboard", "/web/api.js"):
        assert web.get(path).status_code == 200, path
    guarded = ("/health_generate", "/get_server_info", "/metrics", "/dashboard/figures", "/web")
    for path in guarded:
        assert web.get(path).status_code == 401, path
    # Names of keys are in them.
    for path in ("/metrics", "/dashboard/figures"):
        assert web.get(path, headers=bearer("dave")).status_code == 200, path


@pytest.mark.parametrize(
    ("flags", "is_open"),
    [
        ({}, True),
        ({"api_key": "x"}, False),
        ({"api_key": "x", "protect_metrics": False}, True),
        ({"protect_metrics": True}, False),
    ],
)
def test_who_may_read_metrics(flags: dict[str, Any], is_open: bool) -> None:
    config = GatewayConfig(**flags)
    gate = GateMiddleware(None, Gate(config), config)  # type: ignore[arg-type]
    assert gate.is_open("/metrics") == gate.is_open("/dashboard/figures") == is_open


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
    pages = (
        web.get("/metrics", headers=bearer("main")).text
        + web.get("/dashboard/figures", headers=bearer("main")).text
    )
    commands = "".join(part for service in guarded.services for part in service.command)
    everything = "\n".join([*lines, pages, commands])
    assert not [secret for secret in SECRETS.values() if secret in everything]
    pids = {state.name: state.pid for state in guarded.states()}
    for name, pid in pids.items():
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
        assert (SECRETS["main"] in environment) == (name == "gateway")
        assert SECRETS["main"] not in Path(f"/proc/{pid}/cmdline").read_text()


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


@pytest.mark.parametrize("num_digits", [13, 400, 5000])
def test_limits_that_are_too_large(tmp_path: Path, num_digits: int) -> None:
    path = tmp_path / "keys"
    number = "9" * num_digits
    path.write_text(f"a x\nb y tokens={number}\n")
    with pytest.raises(ConfigError, match=r"keys, line 2: tokens= must be at most 1e\+12"):
        keys.read_file(path, Limits())
    flags = ["--key-tokens-per-minute", number]
    command = [sys.executable, "-m", "gateway", "--port=0", "--grpc-port=0", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert "--key-tokens-per-minute" in ended.stderr


def test_the_largest_limit(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a x tokens=1000000000000\n")
    [key] = keys.read_file(path, Limits())
    assert key.limits.tokens == 10**12
    assert Caller("a", key.limits)._tokens.take(10**12) == 0


def test_what_a_line_does_not_say_is_as_for_all(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    digest = hashlib.sha256(b"second").hexdigest()
    path.write_text(
        "a first concurrent=1 tokens=3  # the best\n"
        "# nobody\n\n"
        f"b sha256:{digest} requests=2\n"
        "c third\n"
    )
    found = {key.name: key for key in keys.read_file(path, Limits(7, 8, 9))}
    assert {name: key.limits for name, key in found.items()} == {
        "a": Limits(1, 8, 3),
        "b": Limits(7, 2, 9),
        "c": Limits(7, 8, 9),
    }
    for name, secret in (("a", "first"), ("b", "second"), ("c", "third")):
        assert keys.find(found.values(), secret) is found[name]
        assert keys.find(found.values(), secret + "x") is None
    assert keys.find(found.values(), "") is None
    # What is cut off a secret that is too long must not make it a shorter one.
    longest = "x" * keys.MAX_SECRET_CHARACTERS
    path.write_text(f"d {longest}\n")
    [only] = keys.read_file(path, Limits())
    assert keys.find([only], longest) is only
    assert keys.find([only], longest + "x") is None
    assert keys.find([only], longest + "xyz") is None


def test_a_secret_may_have_a_number_sign(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a se#cret#\nb second # nobody's#\nc third\t#x\n  # d fourth\n#e fifth\n")
    found = keys.read_file(path, Limits())
    for name, secret in (("a", "se#cret#"), ("b", "second"), ("c", "third")):
        key = keys.find(found, secret)
        assert key is not None
        assert key.name == name
    assert keys.find(found, "se") is None
    assert len(found) == 3
    assert keys.find([keys.single("#se#cret", Limits())], "#se#cret")  # --api-key


def test_a_secret_and_its_digest_are_one_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"a x\nb sha256:{hashlib.sha256(b'x').hexdigest()}\n")
    with pytest.raises(ConfigError, match="same secret"):
        keys.read_file(path, Limits())


def test_a_response_is_its_keys_own(web: httpx.Client) -> None:
    mine, theirs = bearer("main"), bearer("dave")
    body = {"input": "ab", "max_output_tokens": 4}
    kept = web.post("/v1/responses", headers=mine, json=body).json()["id"]
    path = f"/v1/responses/{kept}"
    for headers, status in ((None, 401), (theirs, 404)):
        assert web.post("/v1/responses", headers=headers, json=body).status_code in (200, 401)
        assert web.get(path, headers=headers).status_code == status
        assert web.delete(path, headers=headers).status_code == status
        continued = {**body, "previous_response_id": kept}
        answer = web.post("/v1/responses", headers=headers, json=continued)
        assert answer.status_code == status
    assert web.get(path, headers=mine).json()["id"] == kept
    assert web.delete(path, headers=mine).json()["deleted"]
    assert web.get(path, headers=mine).status_code == 404


def test_anthropics_client_shows_its_key(guarded: LocalStack) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "ab"}]}
    for secret in (SECRETS["main"], "wrong"):
        with anthropic.Anthropic(
            base_url=guarded.urls["http"], api_key=secret, max_retries=0
        ) as client:
            if secret == "wrong":
                with pytest.raises(anthropic.AuthenticationError, match="not known here"):
                    client.messages.create(**asked)
            else:
                assert client.messages.create(**asked).usage.output_tokens
                assert client.messages.count_tokens(model="tiny", messages=asked["messages"])


def test_a_key_may_come_as_anthropics_header(web: httpx.Client) -> None:
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "ab"}]}
    for headers, status in (
        ({"x-api-key": SECRETS["main"]}, 200),
        ({"x-api-key": "x"}, 401),
        ({}, 401),
    ):
        answer = web.post("/v1/messages", headers=headers, json=body)
        assert answer.status_code == status
        if status == 401:
            assert answer.json()["type"] == "error"
            assert answer.json()["error"]["type"] == "authentication_error"


def test_the_limits_of_a_key_hold_for_messages_too(web: httpx.Client) -> None:
    asked = {"max_tokens": 100, "messages": [{"role": "user", "content": "ab"}], "ignore_eos": True}
    # The prompt and 100 tokens are more than its minute; a full bucket lets them through once.
    answers = [web.post("/v1/messages", headers=bearer("carol"), json=asked) for _ in range(2)]
    again = answers[-1]
    assert (again.status_code, again.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(again.headers["retry-after"]) >= 1
