"""`foredraft generate` with the real services, in a pipe and in a terminal."""

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testing.stack import eventually, make_model, running_stack

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "foredraft.cli.main", "generate"]
SERVICES = ("--device=cpu", "--num-threads=1", "--max-total-tokens=2048", "--page-size=16")
PROMPT = "The quick brown fox"
REPEATING = "ab ab ab ab ab ab"
# Text that nobody drafted and text that somebody did, as a terminal gets them.
GREEN = re.compile("\x1b\\[32m(.*?)\x1b\\[0m", re.S)
STYLE = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("generate") / "model", context_length=2048)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    with running_stack(model) as stack:
        yield stack.urls["http"]


def generate(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_full_disk_under_the_text_is_told(server: str) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*COMMAND, f"--server={server}", "--max-tokens=5", "x"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "foredraft generate: the text cannot be written: No space left on device"
    ]


def in_terminal(*arguments: str) -> str:
    """Returns what a terminal shows of both streams."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait(120) == 0
    return shown.decode().replace("\r\n", "\n")


def expected(server: str, prompt: str, **fields: object) -> str:
    body = {"prompt": prompt, "temperature": 0, **fields}
    answer = httpx.post(f"{server}/v1/completions", json=body, timeout=60)
    return str(answer.json()["choices"][0]["text"])


def test_one_shot_starts_the_services_and_prints_the_models_text(model: Path, server: str) -> None:
    flags = ("--max-tokens=24", "--temperature=0.8", "--seed=3")
    one = generate(f"--model-path={model}", *SERVICES, *flags, PROMPT)
    assert one.returncode == 0, one.stderr
    text = expected(server, PROMPT, max_tokens=24, temperature=0.8, seed=3)
    assert one.stdout == text + "\n"
    # No log line and no style: the closing line is all there is.
    (line,) = one.stderr.splitlines()
    assert re.search(
        r"^\d+ tokens · .* · then [\d.]+ tokens/s · accept length \d\.\d\d .* seed 3 ·", line
    )
    assert "\x1b" not in one.stdout + one.stderr


def test_a_server_that_runs_is_asked_without_starting_any(server: str) -> None:
    text = expected(server, PROMPT, max_tokens=20)
    for where in (server, server + "/", server + "/v1/", server.removeprefix("http://")):
        asked = generate(f"--server={where}", "--max-tokens=20", PROMPT)
        assert (asked.returncode, asked.stdout) == (0, text + "\n"), asked.stderr
    piped = generate(f"--server={server}", "--max-tokens=20", "-", stdin=PROMPT)
    assert piped.stdout == text + "\n"


def test_a_server_on_this_machine_is_not_asked_through_a_proxy(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    asked = generate(f"--server={server}", "--max-tokens=2", PROMPT)
    assert asked.returncode == 0, asked.stderr
    through = generate("--server=http://model.invalid", PROMPT)
    assert "refused" in through.stderr  # by the proxy


def test_no_speculation_gives_the_same_text(server: str) -> None:
    flags = (f"--server={server}", "--max-tokens=60", "--temperature=0.7", "--seed=5")
    with_draft = generate(*flags, REPEATING)
    with_draft = generate(*flags, REPEATING)  # the draft knows the text now
    without = generate(*flags, "--no-speculation", REPEATING)
    assert without.stdout == with_draft.stdout
    assert "drafted tokens accepted" in with_draft.stderr
    assert "drafted tokens accepted" not in without.stderr
    # The prompt's own pass gives a token too, so that it is a little more than one a step.
    assert "accept length 1.0" in without.stderr


def test_chat_and_stop(server: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 30}
    answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60).json()
    text = answer["choices"][0]["message"]["content"]
    chat = generate(f"--server={server}", "--chat", "--system=Be brief.", "--max-tokens=30", "Hi")
    assert chat.stdout == text + "\n"
    stop = text[6:9]
    cut = generate(
        f"--server={server}", "--chat", "--system=Be brief.", f"--stop={stop}", "--stop=zzzz", "Hi"
    )
    assert cut.stdout == text[: text.index(stop)] + "\n"
    assert "ended by stop" in cut.stderr


def test_a_terminal_shows_drafted_tokens_in_green(server: str) -> None:
    flags = (f"--server={server}", "--max-tokens=60", REPEATING)
    plain = generate(*flags)
    shown = in_terminal(*flags)
    text, _, closing = shown.rstrip("\n").rpartition("\n")
    # Control characters that the model wrote are not passed on.
    safe = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in plain.stdout)
    assert STYLE.sub("", text) + "\n" == safe
    accepted = re.search(r"(\d+) of \d+ drafted tokens accepted", closing)
    assert accepted
    # A token can be half a character, and such a token has no text of its own.
    assert 0 < len(GREEN.findall(text)) <= int(accepted[1])
    assert not set("\x1b") & set(STYLE.sub("", text))


def test_a_reader_that_goes_away_ends_it_quietly(server: str) -> None:
    with subprocess.Popen(
        [*COMMAND, f"--server={server}", "--max-tokens=400", PROMPT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.wait(120) in (0, 1)
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize("when", ["starting", "streaming"])
def test_ctrl_c_leaves_nothing_behind(model: Path, when: str) -> None:
    # This seed's text does not end before.
    flags = ("--max-tokens=1400", "--temperature=1", "--no-speculation", "--seed=1")
    process = subprocess.Popen(
        [*COMMAND, f"--model-path={model}", *SERVICES, *flags, PROMPT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # Where the tests run in the background, a shell has had the signal ignored for all of them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout
    eventually(lambda: process.poll() is not None or len(children_of(process.pid)) == 3)
    children = children_of(process.pid)
    if when == "streaming":
        assert process.stdout.read(1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
    eventually(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--server=http://127.0.0.1:9", "x"], "refused; `foredraft serve` starts a server"),
        (["--server=SERVER", "--temperature=-1", "x"], "temperature: must be in"),
        (["--server=SERVER", "--top-p=7", "x"], "top_p: must be in"),
        (
            ["--server=SERVER", "--max-tokens=100000", "x"],
            "max_tokens: 100000 tokens after a prompt of",
        ),
        (["--server=SERVER", "--seed", str(2**70), "x"], "seed: must fit 64 bits"),
        (["--server=SERVER/nothing", "x"], "POST /nothing/v1/completions: Not Found"),
    ],
)
def test_failures_are_one_line(server: str, arguments: list[str], said: str) -> None:
    failed = generate(*(argument.replace("SERVER", server) for argument in arguments))
    assert failed.returncode == 1
    assert said in failed.stderr
    assert len(failed.stderr.splitlines()) == 1
    assert failed.stdout == ""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"\0\0\x18\4\0", "what listens there speaks no HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\ndata", "broke off"),
    ],
)
def test_what_is_no_whole_answer_is_told(answer: bytes, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_answer_once, args=(listening, answer))
        thread.start()
        failed = generate(f"--server=127.0.0.1:{listening.getsockname()[1]}", "x")
        thread.join()
    assert failed.returncode == 1
    assert said in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


def _answer_once(listening: socket.socket, answer: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        request = b""
        while not request.endswith(b"}"):
            request += connection.recv(65536)
        connection.sendall(answer)


def test_any_locale_takes_and_shows_utf8(server: str) -> None:
    text = "ab 日本語 😀 ab"
    plain = generate(f"--server={server}", "--max-tokens=8", "--seed=1", text)
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    for arguments, given in (([text], b""), (["-"], text.encode())):
        shown = subprocess.run(
            [*COMMAND, f"--server={server}", "--max-tokens=8", "--seed=1", *arguments],
            cwd=ROOT,
            env={**environment, "PYTHONIOENCODING": "ascii"},
            input=given,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.replace(b"\r", b"\n") == plain.stdout.encode("ascii", "replace")


def test_what_is_not_utf8_is_a_wrong_prompt(server: str) -> None:
    for arguments, given in ((["-"], b"hi \xff"), ([b"hi \xff"], b"")):
        wrong = subprocess.run(
            [*COMMAND, f"--server={server}", *arguments],
            cwd=ROOT,
            input=given,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert wrong.returncode == 2
        assert b"must be UTF-8" in wrong.stderr


def test_no_token_has_no_time(server: str) -> None:
    shown = generate(f"--server={server}", "--max-tokens=0", "--seed=1", "x")
    assert shown.returncode == 0
    assert shown.stdout == "\n"
    assert shown.stderr.startswith("0 tokens · accept length 0.00 · seed ")


def test_services_that_cannot_start_show_why(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[:1000])
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    failed = generate(f"--model-path={tmp_path}", *SERVICES, "--speculative-algorithm=NONE", "x")
    assert failed.returncode == 1
    assert f"{tmp_path}/model.safetensors: truncated" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "PROMPT"),
        (["--system=x", "y"], "--system needs --chat"),
        (["--max-tokens=many", "x"], "--max-tokens"),
        (["--server=http://x", "--model-path=y", "z"], "--model-path has no use with it"),
        (["--server=http://x", "--dtype=float32", "z"], "--dtype has no use with it"),
        (["--model-path=/no/such/model", "x"], "no such directory"),
        (["--no-such-flag", "x"], "--no-such-flag"),
    ],
)
def test_wrong_flags(arguments: list[str], said: str) -> None:
    wrong = generate(*arguments)
    assert wrong.returncode == 2
    assert said in wrong.stderr


@pytest.mark.parametrize("key", ["open\nsesame", "open sesame", "sesameключ"])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_API_KEY", key)
    wrong = generate("--server=http://127.0.0.1:9", "x")
    assert wrong.returncode == 2
    assert "--api-key: a secret has 1 to 512 printable ASCII characters, no spaces" in wrong.stderr
    assert "sesame" not in wrong.stderr


def test_help_teaches() -> None:
    shown = generate("--help")
    assert shown.returncode == 0
    assert "examples:" in shown.stdout
    assert "--speculative-algorithm" in shown.stdout
