"""`foredraft generate`, as a user runs it: against a gateway, and with services of its own."""

import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from foredraft.cli.stack import LocalStack
from tests.support import stack as stacks

PROMPT = "ab ab ab ab"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stacks.make_model(tmp_path_factory.mktemp("generate") / "model")


@pytest.fixture(scope="module")
def stack(model: Path) -> Iterator[LocalStack]:
    with stacks.running_stack(model) as running:
        yield running


def generate(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "foredraft.cli.main", "generate", *arguments]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, timeout=120
    )


def test_text_and_closing_line(stack: LocalStack) -> None:
    flags = (
        "--server",
        stack.urls["http"],
        "--max-tokens",
        "60",
        "--seed",
        "5",
        "--temperature",
        "0.8",
    )
    first = generate(PROMPT, *flags)
    assert first.returncode == 0, first.stderr
    again = generate("-", *flags, text=PROMPT)
    assert again.stdout == first.stdout
    closing = re.search(r"(\d+) tokens .* tokens/s · accept length ([\d.]+) .*seed 5", again.stderr)
    assert closing, again.stderr
    assert int(closing[1]) <= 60
    assert float(closing[2]) >= 1


def test_drafted_tokens_have_a_colour_on_a_terminal(stack: LocalStack) -> None:
    command = [sys.executable, "-m", "foredraft.cli.main", "generate", PROMPT, "--max-tokens", "80"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": ""}
    process = subprocess.Popen(
        [*command, "--server", stack.urls["http"]], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                shown.extend(os.read(ours, 65536))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(60) == 0
    reader.join()
    os.close(ours)
    assert b"\x1b[32m" in shown
    assert b"accept length" in shown


def test_chats(stack: LocalStack) -> None:
    flags = ("--server", stack.urls["http"], "--chat", "--max-tokens", "8")
    plain, system = generate("Hi", *flags), generate("Hi", "--system", "Be brief.", *flags)
    assert plain.returncode == system.returncode == 0
    assert plain.stdout != system.stdout


def test_starts_and_stops_services_of_its_own(model: Path) -> None:
    done = generate(
        PROMPT, "--model-path", str(model), "--max-tokens", "5", "--num-threads", "1",
        "--max-total-tokens", "2048", "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"\b5 tokens\b", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("x", "--server", "http://127.0.0.1:1"), 1, "no answer"),
        (("x", "--server", "http://127.0.0.1:1", "--dtype", "float32"), 2, "--dtype"),
        (("x", "--system", "y"), 2, "--chat"),
        (("x", "--model-path", "/nowhere/at/all"), 2, "--model-path"),
        ((), 2, "PROMPT"),
    ],
)
def test_errors(arguments: tuple[str, ...], status: int, message: str) -> None:
    done = generate(*arguments)
    assert done.returncode == status
    assert message in done.stderr


def test_a_refusal_is_shown(stack: LocalStack) -> None:
    done = generate("x", "--server", stack.urls["http"], "--top-p", "7")
    assert done.returncode == 1
    assert "top_p" in done.stderr


def test_help_teaches() -> None:
    done = generate("--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert "--speculative-algorithm" in done.stdout
