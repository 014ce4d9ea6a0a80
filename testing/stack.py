"""A tiny model and the shipped services on it, as real processes."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

from foredraft.cli.ports import bind_free
from foredraft.cli.stack import LocalStack, make_supervisor
from foredraft.rpc.lifetime import child_environment
from testing.forked import ForkedModule, forked
from testing.tiny_tokenizers import byte_level, save

Outcome = TypeVar("Outcome")
VOCAB_SIZE = 600
gateway_processes: list[
    ForkedModule | subprocess.Popen[bytes]
] = []  # started by running_gateway, newest last
CONTEXT_LENGTH = 512
LONG_REQUEST: dict[str, Any] = {
    "text": "Once upon a time",
    "sampling_params": {"max_new_tokens": 150, "temperature": 0, "ignore_eos": True},
}


def make_model(directory: Path, context_length: int = CONTEXT_LENGTH) -> Path:
    """Creates a random Llama with a byte-level tokenizer and a chat template; its text is
    nonsense, broken UTF-8 included.
    """
    from testing.checkpoints import make_checkpoint  # brings torch

    make_checkpoint(directory, vocab_size=VOCAB_SIZE, max_position_embeddings=context_length)
    save(byte_level(VOCAB_SIZE), directory)
    return directory


@contextlib.contextmanager
def running_stack(
    model: Path, lines: list[str] | None = None, is_forked: bool = True, **flags: Any
) -> Iterator[LocalStack]:
    """Runs gateway, verifier and an n-gram draft on free ports, until the block ends.

    Args:
        model: Directory of the model.
        lines: Collects their logs.
        is_forked: Whether processes are forked from one that has imported everything; a start of
            the verifier takes seconds otherwise.
        flags: Fields of the configuration.
    """
    values = {
        "model_path": str(model),
        "served_model_name": "tiny",
        "device": "cpu",
        "num_threads": 1,
        "max_total_tokens": 8192,
        "page_size": 16,
        "speculative_adaptive": False,  # no draft pays for a model as small as this
        # On a busy machine no draft is lost, and no grammar refused.
        "draft_step_timeout": 20.0,
        "grammar_timeout": 60.0,
        "port": 0,
        "grpc_port": 0,
        **flags,
    }
    lines = [] if lines is None else lines
    stack = make_supervisor(values, on_line=lambda name, line: lines.append(f"{name}: {line}"))
    if is_forked and values["device"] == "cpu":  # CUDA must not be forked
        stack.launch = forked
    try:
        with stack:
            stack.wait_healthy(timeout=300)
            yield stack
    finally:
        # pytest shows it beside a failure.
        print("\n".join(lines))


@contextlib.contextmanager
def running_gateway(
    *verifiers: str, is_forked: bool = True, **flags: Any
) -> Iterator[tuple[str, str]]:
    """Runs a gateway process alone; yields the HTTP URL and the address of its gRPC once it
    listens.
    """
    http, grpc = free_port(), free_port()
    options = {"port": http, "grpc_port": grpc, **flags}
    arguments = [f"--verifier={where}" for where in verifiers]
    arguments += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    process: ForkedModule | subprocess.Popen[bytes]
    if is_forked:
        process = ForkedModule("gateway", *arguments, environment=child_environment())
    else:  # with this process's limits
        command = [sys.executable, "-m", "gateway", *arguments]
        process = subprocess.Popen(command, env=child_environment())
    gateway_processes.append(process)
    try:
        eventually(lambda: is_listening(grpc) and is_listening(http))
        yield f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
    finally:
        process.terminate()
        assert process.wait(60) == 0


def free_port() -> int:
    """Returns a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        return bind_free(probe, "127.0.0.1")


def eventually(condition: Callable[[], Outcome], seconds: float = 120.0) -> Outcome:
    """Waits until a condition holds and returns its value; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (outcome := condition()):
        assert time.monotonic() < deadline, f"it did not come true within {seconds:g} s"
        time.sleep(0.01)
    return outcome


def metric(page: str, name: str) -> float:
    """Returns the sum of a metric's samples on a page; the name with all labels selects one
    sample.
    """
    lines = [line for line in page.splitlines() if line.startswith((name + " ", name + "{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def long_answer(url: str, num_tokens: int = 150) -> str:
    """Sends `LONG_REQUEST` to a gateway, for so many tokens; returns its text."""
    params = {**LONG_REQUEST["sampling_params"], "max_new_tokens": num_tokens}
    with httpx.Client(base_url=url, timeout=120) as http:
        reply = http.post("/generate", json={**LONG_REQUEST, "sampling_params": params})
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["text"]
    return text


def is_idle(http: httpx.Client) -> bool:
    """Returns whether no verifier of a gateway has anything to do."""
    loads = http.get("/get_server_info").json()["verifiers"].values()
    return all(load["running"] + load["waiting"] == 0 for load in loads)


def is_listening(port: int) -> bool:
    """Returns whether a TCP port of this machine takes connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
