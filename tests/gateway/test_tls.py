"""TLS and mutual TLS of both fronts and between the services, with certificates made here."""

import contextlib
import socket
import ssl
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.cli.stack import LocalStack
from foredraft.errors import ConfigError
from foredraft.rpc.channel import check_health
from foredraft.rpc.lifetime import child_environment
from foredraft.rpc.tls import Identity
from testing import stack as stacks
from testing.certificates import Authority, Certificate
from testing.stack import eventually, free_port

BODY = {"prompt": "ab", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder, "authority")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Certificate:
    return authority.sign("server")


@pytest.fixture(scope="module")
def client(authority: Authority) -> Certificate:
    return authority.sign("client")


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Certificate:
    return Authority(folder, "elsewhere").sign("stranger")


@pytest.fixture(scope="module")
def mutual(model: Path, server: Certificate, authority: Authority) -> Iterator[LocalStack]:
    flags = {
        "ssl_certfile": str(server.file),
        "ssl_keyfile": str(server.key),
        "ssl_ca_certs": str(authority.file),
    }
    with stacks.running_stack(model, **flags) as running:
        yield running


def context(trusted: Path, own: Certificate | None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(trusted))
    if own is not None:
        made.load_cert_chain(own.file, own.key)
    return made


def secure_channel(address: str, trusted: Path, own: Certificate | None) -> grpc.Channel:
    parts = (None, None) if own is None else (own.key.read_bytes(), own.file.read_bytes())
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(trusted.read_bytes(), *parts))


def generate(channel: grpc.Channel) -> str:
    stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
    asked = inference_pb2.GenerateRequest(
        text="ab", sampling=inference_pb2.SamplingParams(temperature=0, max_new_tokens=4)
    )
    return "".join(response.text for response in stub.Generate(asked, timeout=60))


def test_both_fronts(mutual: LocalStack, authority: Authority, client: Certificate) -> None:
    url = mutual.urls["http"]
    assert url.startswith("https://")
    with httpx.Client(verify=context(authority.file, client), timeout=60) as web:
        made = openai.OpenAI(base_url=url + "/v1", api_key="none", http_client=web, max_retries=0)
        text = made.completions.create(model="tiny", **BODY).choices[0].text  # type: ignore[call-overload]
        assert web.get(url + "/health").json()["status"] == "ok"
    with secure_channel(mutual.urls["grpc"], authority.file, client) as channel:
        assert generate(channel) == text


def test_who_is_refused(
    mutual: LocalStack, authority: Authority, stranger: Certificate, client: Certificate
) -> None:
    url, address = mutual.urls["http"], mutual.urls["grpc"]
    for trusted, own in (
        (authority.file, None),
        (authority.file, stranger),
        (stranger.authority, client),
    ):
        with (
            pytest.raises(httpx.TransportError),
            httpx.Client(verify=context(trusted, own), timeout=20) as web,
        ):
            web.get(url + "/health")
        with secure_channel(address, trusted, own) as channel, pytest.raises(grpc.RpcError) as no:
            generate(channel)
        assert no.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http") + "/health", timeout=20)
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
        generate(channel)
    old = context(authority.file, client)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.TransportError):
        httpx.get(url + "/health", verify=old, timeout=20)


def test_a_new_certificate_is_taken_without_a_restart(
    mutual: LocalStack, authority: Authority, client: Certificate, server: Certificate
) -> None:
    def serial(address: str, alpn: str) -> Any:
        host, _, port = address.rpartition(":")
        made = context(authority.file, client)
        made.set_alpn_protocols([alpn])
        with (
            socket.create_connection((host, int(port)), timeout=20) as raw,
            made.wrap_socket(raw, server_hostname="127.0.0.1") as secured,
        ):
            return secured.getpeercert()["serialNumber"]  # type: ignore[index]

    fronts = [(mutual.urls["http"].partition("//")[2], "http/1.1"), (mutual.urls["grpc"], "h2")]
    before = [serial(*front) for front in fronts]
    assert before[0] == before[1]
    # A key that does not fit (yet) is not taken.
    right = server.key.read_bytes()
    server.key.write_bytes(client.key.read_bytes())
    assert [serial(*front) for front in fronts] == before
    server.key.write_bytes(right)
    authority.sign("server")
    eventually(lambda: all(serial(*front) != before[0] for front in fronts))
    with secure_channel(mutual.urls["grpc"], authority.file, client) as channel:
        assert generate(channel) is not None


def test_sockets_are_for_the_owner_alone(mutual: LocalStack) -> None:
    assert stat.S_IMODE(mutual.directory.stat().st_mode) == 0o700
    modes = {path.name: path.stat().st_mode for path in mutual.directory.glob("*.sock")}
    assert set(modes) == {"gateway.sock", "verify.sock", "draft.sock"}
    for mode in modes.values():
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600


@contextlib.contextmanager
def process(module: str, *flags: str) -> Iterator[None]:
    command = [sys.executable, "-m", module, *flags]
    running = subprocess.Popen(command, env=child_environment())
    try:
        yield
    finally:
        running.terminate()
        assert running.wait(30) == 0


def test_between_services(
    model: Path, authority: Authority, stranger: Certificate, server: Certificate
) -> None:
    services = {name: authority.sign("service", name) for name in ("gateway", "verify", "draft")}
    verify, draft = (f"127.0.0.1:{free_port()}" for _ in range(2))

    def tls(name: str) -> dict[str, str]:
        own = services[name]
        files = {"cert": own.file, "key": own.key, "ca": own.authority, "name": "service"}
        return {f"service_tls_{part}": str(value) for part, value in files.items()}

    def flags(name: str, **others: object) -> list[str]:
        own: dict[str, object] = {**tls(name), **others}
        return [f"--{flag.replace('_', '-')}={value}" for flag, value in own.items()]

    common = {"model_path": model, "device": "cpu", "num_threads": 1}
    identity = Identity(*(str(path) for path in (server.file, server.key, authority.file)))
    with contextlib.ExitStack() as running:
        enter = running.enter_context
        enter(process("draft_service", *flags("draft", listen=draft, **common)))
        more = {
            **common,
            "page_size": 16,
            "max_total_tokens": 4096,
            "draft": draft,
            "listen": verify,
        }
        enter(process("verify_service", *flags("verify", **more)))
        mine = Identity(*(str(path) for path in vars_of(services["gateway"])), name="service")
        eventually(lambda: check_health(verify, identity=mine) == "SERVING", 90)
        # Without a certificate of this authority, or under another name, nobody gets in.
        assert check_health(verify) == "UNREACHABLE"
        assert check_health(draft) == "UNREACHABLE"
        wrong = Identity(str(stranger.file), str(stranger.key), str(authority.file))
        assert check_health(verify, identity=wrong) == "UNREACHABLE"
        other_name = Identity(str(server.file), str(server.key), str(authority.file), "other")
        assert check_health(draft, identity=other_name) == "UNREACHABLE"
        eventually(lambda: check_health(draft, identity=identity) == "SERVING")
        asked = [sys.executable, "-m", "foredraft.rpc.healthcheck", verify, *flags("gateway")]
        asked.append("--timeout=60")
        assert subprocess.run(asked, capture_output=True, check=False).stdout == b"SERVING\n"
        gateway = stacks.running_gateway(verify, **tls("gateway"))
        url, _ = enter(gateway)
        eventually(lambda: httpx.get(url + "/health", timeout=60).status_code == 200)
        answer = httpx.post(url + "/v1/completions", json=BODY, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        health = httpx.get(url + "/health", timeout=60).json()
        assert health["status"] == "ok"
        plain, _ = enter(stacks.running_gateway(verify))
        assert httpx.post(plain + "/v1/completions", json=BODY, timeout=60).status_code == 503


def vars_of(certificate: Certificate) -> tuple[Path, Path, Path]:
    return certificate.file, certificate.key, certificate.authority


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ssl-certfile=nothing.pem",), "needed together"),
        (("--ssl-certfile=nothing.pem", "--ssl-keyfile=nothing.key"), "No such file"),
        (("--service-tls-cert=nothing.pem",), "needed together"),
        (
            ("--ssl-certfile={server.file}", "--ssl-keyfile={client.key}"),
            "{server.file} and {client.key}: the key belongs to another certificate",
        ),
        (
            ("--ssl-certfile={server.key}", "--ssl-keyfile={server.file}"),
            "{server.key} and {server.file}: one of them is not",
        ),
        (("--allowed-origin=chat.example",), "--allowed-origin chat.example: must be"),
    ],
)
def test_wrong_files_stop_the_start(
    flags: tuple[str, ...], message: str, server: Certificate, client: Certificate
) -> None:
    filled = [flag.format(server=server, client=client) for flag in flags]
    command = [sys.executable, "-m", "gateway", "--port=0", "--grpc-port=0", *filled]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "cannot start" in ended.stderr
    assert message.format(server=server, client=client) in ended.stderr


def test_an_identity_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--flags"):
        Identity(str(tmp_path / "a"), str(tmp_path / "b")).check("--flags")
