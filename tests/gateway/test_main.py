"""Tests the gateway's process: what it needs to start, and what it says where it cannot."""

import os
import re
import socket
import subprocess
import sys
from typing import Any

import grpc
import httpx
import pytest

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from testing import stack as stacks


def test_without_a_verifier() -> None:
    with stacks.running_gateway("127.0.0.1:1") as (http, grpc_address):
        for path, body in (
            ("/v1/completions", {"prompt": "x", "max_tokens": 50}),
            ("/generate", {"text": "x"}),
        ):
            reply = httpx.post(http + path, json=body, timeout=30)
            assert reply.status_code == 503
            assert reply.headers["retry-after"] == "1"
            assert "the server is starting" in reply.json()["error"]["message"]
        for path in ("/health", "/v1/models", "/get_model_info", "/health_generate"):
            assert httpx.get(http + path, timeout=30).status_code == 503
        assert httpx.get(http + "/metrics", timeout=60).status_code == 200
        with grpc.insecure_channel(grpc_address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError) as down:
                list(stub.Generate(inference_pb2.GenerateRequest(text="x")))
            assert down.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_the_gateway_never_reaches_torch() -> None:
    code = (
        "import sys, gateway.__main__, foredraft.cli.main, foredraft.cli.generate,"
        " foredraft.cli.serve\nprint(sorted({name.split('.')[0] for name in sys.modules} &"
        " {'torch', 'transformers'}))"
    )
    python = sys.executable
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("flags", "variables", "status", "says"),
    [
        (["--verifier=nonsense"], {}, 1, "--verifier: address 'nonsense' is neither host:port"),
        (["--verifier=http://a:1"], {}, 1, "--verifier: address 'http://a:1': host:port is taken"),
        (["--verifier=dns:a"], {}, 1, "--verifier: address 'a' is neither host:port"),
        ([], {"FOREDRAFT_PORT": "tcp://10.0.0.1:80"}, 2, "FOREDRAFT_PORT: .*enableServiceLinks"),
    ],
)
def test_what_it_cannot_start_with_is_named(
    flags: list[str], variables: dict[str, str], status: int, says: str
) -> None:
    command = [sys.executable, "-m", "gateway", *flags]
    environment = {**os.environ, **variables}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == status
    assert re.search(says, ended.stderr)


def test_a_port_that_is_taken_is_all_that_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "gateway", "--port=0"]
        command.append(f"--grpc-port={taken.getsockname()[1]}")
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "cannot start: cannot listen on 127.0.0.1:" in last
