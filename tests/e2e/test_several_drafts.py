"""`foredraft serve` with two models and n-grams as drafts of the bundled model: one text whichever
drafts, and a name for who did.
"""

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.stack import LocalStack
from foredraft.models.provenance import checksum, model_checksum
from testing.stack import eventually, running_stack

MODELS = Path(__file__).parents[2] / "models"
TARGET, HEAD = MODELS / "foredraft-demo", MODELS / "foredraft-demo-eagle3"
SMALL = MODELS / "foredraft-demo-draft"
PROMPTS = (
    "Once upon a time there was a little girl named Lily.",
    "def f(a):\n    return a\n\ndef g(a):\n    return a\n\ndef h(a):\n",
)


def ask(stack: LocalStack, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(stack.urls["http"] + path, data, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def choices(stack: LocalStack) -> list[dict[str, Any]]:
    """Returns a greedy and a seeded continuation of each prompt, all requested at once."""
    bodies = [
        {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 80,
            "temperature": temperature,
            "seed": 5,
            "return_provenance": True,
        }
        for prompt in PROMPTS
        for temperature in (0.0, 0.8)
    ]
    found: list[Any] = [None] * len(bodies)

    def run(i: int) -> None:
        found[i] = ask(stack, "/v1/completions", bodies[i])["choices"][0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def texts(found: list[dict[str, Any]]) -> list[str]:
    return [choice["text"] for choice in found]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    with running_stack(TARGET, speculative_algorithm="NONE") as stack:
        return texts(choices(stack))


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    flags = {
        "speculative_algorithm": "EAGLE3,STANDALONE,NGRAM",
        "speculative_draft_model_path": f"EAGLE3={HEAD},STANDALONE={SMALL}",
        "skip_draft_self_test": False,
    }
    with running_stack(TARGET, **flags) as running:
        eventually(lambda: ask(running, "/health")["status"] == "ok")
        yield running


def test_each_draft_is_a_service_with_a_name(stack: LocalStack, plain: list[str]) -> None:
    names = [service.name for service in stack.services]
    assert names == ["gateway", "verify", "draft-eagle3", "draft-standalone", "draft-ngram"]
    info = ask(stack, "/get_server_info")
    assert info["speculative_algorithm"] == "EAGLE3,STANDALONE,NGRAM"
    assert info["checksum"] == model_checksum(TARGET)
    told = [(draft["name"], draft["model"], draft["checksum"]) for draft in info["drafts"]]
    assert told == [
        ("EAGLE3", HEAD.name, checksum(HEAD)),
        ("STANDALONE", SMALL.name, checksum(SMALL)),
        ("NGRAM", "", ""),
    ]
    assert info["drafts"][0]["quantization"] == "unquant"
    found = choices(stack)
    assert texts(found) == plain
    proposers = {step["draft"] for choice in found for step in choice["steps"] if step["drafted"]}
    assert proposers <= {"EAGLE3", "STANDALONE", "NGRAM"}
    assert proposers


@pytest.mark.parametrize("name", ["draft-eagle3", "draft-standalone"])
def test_killed_in_the_middle_it_is_missed_and_comes_back(
    stack: LocalStack, plain: list[str], name: str
) -> None:
    found: list[dict[str, Any]] = []
    worker = threading.Thread(target=lambda: found.extend(choices(stack)))
    worker.start()
    eventually(lambda: _running(stack) > 0 or not worker.is_alive())
    pid = next(state.pid for state in stack.states() if state.name == name)
    os.kill(pid, signal.SIGKILL)
    worker.join()
    assert texts(found) == plain
    eventually(lambda: ask(stack, "/health")["status"] == "ok")
    assert texts(choices(stack)) == plain


def _running(stack: LocalStack) -> int:
    loads = ask(stack, "/get_server_info")["verifiers"].values()
    return sum(load["running"] for load in loads)
