"""Clients that are not ours: Node with the .proto files, and the programs of docs/clients.md as
they stand there.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from foredraft.cli.stack import LocalStack
from testing import node_packages
from testing.stack import eventually, is_idle

ROOT = Path(__file__).parents[2]
PROMPT = "ab ab ab ab"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
BLOCKS = [
    (language, code)
    for language, code in BLOCK.findall((ROOT / "docs" / "clients.md").read_text())
    if language in ("python", "js") or code.startswith("curl")
]


@pytest.fixture(scope="module")
def node(pytestconfig: pytest.Config) -> dict[str, str]:
    """Returns an environment in which `node` finds the packages."""
    assert pytestconfig.cache is not None
    packages = node_packages.node_path(pytestconfig.cache.mkdir("node"))
    return {**os.environ, "NODE_PATH": str(packages)}


def test_node(stack: LocalStack, http: httpx.Client, node: dict[str, str]) -> None:
    script = Path(__file__).with_name("node_client.cjs")
    command = ["node", str(script), stack.urls["grpc"], "protos", PROMPT]
    output = subprocess.run(
        command, cwd=ROOT, env=node, check=True, stdout=subprocess.PIPE, timeout=120
    ).stdout
    found: dict[str, Any] = json.loads(output)
    seed = 2**64 - 1
    sampling = {"temperature": 0.8, "sampling_seed": seed, "max_new_tokens": 40}
    expected = http.post("/generate", json={"text": PROMPT, "sampling_params": sampling}).json()
    assert found["model"] == "tiny"
    assert found["text"] == expected["text"]
    assert found["ids"] == expected["output_ids"]
    completion = found["completion"]
    assert completion["seed"] == str(seed)
    assert completion["completionTokens"] == len(found["ids"])
    drafted = found["provenances"].count("PROVENANCE_DRAFT")
    assert drafted == completion["speculation"]["acceptedTokens"]
    assert set(found["provenances"]) <= {"PROVENANCE_DRAFT", "PROVENANCE_TARGET"}
    assert found["late"] == "DEADLINE_EXCEEDED"
    assert found["cancelled"] == "CANCELLED"
    assert found["refused"] == "INVALID_ARGUMENT"
    assert found["unknown"] == "NOT_FOUND"
    status = status_pb2.Status.FromString(base64.b64decode(found["details"]))
    details = error_details_pb2.BadRequest()
    assert any(detail.Unpack(details) for detail in status.details)
    assert details.field_violations[0].field == "sampling.temperature"

    eventually(lambda: is_idle(http))


@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=[block[0] for block in BLOCKS])
def test_documented_programs_run(
    stack: LocalStack, language: str, code: str, request: pytest.FixtureRequest
) -> None:
    code = code.replace("http://127.0.0.1:30000", stack.urls["http"])
    code = code.replace("127.0.0.1:50051", stack.urls["grpc"]).replace("foredraft-demo", "tiny")
    environment = dict(os.environ)
    if language == "js":
        command, environment = ["node", "-e", code], request.getfixturevalue("node")
    elif language == "python":
        command = [sys.executable, "-c", code]
    else:
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        command = ["sh", "-c", code]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    known = {
        "InferenceServiceStub(channel).Generate(request))": "sampling.temperature: must be in",
        "drafted tokens accepted": "drafted tokens accepted",
        "chunk.usage": " tokens\n",
        "get_final_message": " tokens\n",
        "responses.delete": "\n",
        "/v1/chat/completions": "data: [DONE]",
        "/generate": '"spec_accept_length":',
    }
    sign = next(sign for mark, sign in known.items() if mark in code)
    assert sign in ran.stdout
