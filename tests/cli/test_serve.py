"""`foredraft serve` with the real services, as a person runs it."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from foredraft.cli.serve import Terminal
from foredraft.cli.stack import ServeConfig
from testing.chaos.processes import is_alive
from testing.checkpoints import make_checkpoint
from testing.stack import eventually, free_port
from testing.tiny_tokenizers import byte_level, save

ROOT = Path(__file__).parents[2]
FLAGS = ("--port=0", "--grpc-port=0", "--max-total-tokens=2048", "--num-threads=1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_level()
    directory = make_checkpoint(
        tmp_path_factory.mktemp("models") / "Tiny", vocab_size=tokenizer.get_vocab_size()
    )
    save(tokenizer, directory)
    return directory


@contextmanager
def serving(
    directory: Path, *flags: str, stderr: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "foredraft.cli.main", "serve", f"--model-path={directory}"]
    process = subprocess.Popen(
        [*command, *FLAGS, *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_ready(process: subprocess.Popen[str]) -> dict[str, str]:
    """Reads the closing table; its addresses by name."""
    assert process.stdout
    shown = ""
    for line in process.stdout:
        shown += line
        if "Ctrl-C" in line:
            assert "curl" in shown
            return dict(re.findall(r"^  (HTTP|gRPC|metrics) +(.+)$", shown, re.M))
    raise AssertionError(f"serve ended: {shown}{process.stderr.read() if process.stderr else ''}")


def children_of(pid: int) -> dict[str, int]:
    """Module name to process id of the services that a supervisor runs."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = stat.with_name("cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid and "-m" in command:
            found[command[command.index("-m") + 1]] = int(stat.parent.name)
    return found


def complete(url: str, **fields: Any) -> str:
    body = {"model": "Tiny", "prompt": "The quick brown", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body | fields).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_serve_answers_recovers_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Path(tempfile.mkdtemp(prefix="fd-", dir="/tmp"))  # short enough for sockets
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    try:
        with serving(checkpoint) as process:
            urls = wait_until_ready(process)
            text = complete(urls["HTTP"])
            for url in urls["metrics"].split():
                with urllib.request.urlopen(url, timeout=60) as answer:
                    assert b"foredraft_build_info" in answer.read()
            [directory] = runtime.iterdir()
            assert {path.name for path in directory.iterdir()} == {
                "gateway.sock",
                "verify.sock",
                "draft.sock",
            }

            children = children_of(process.pid)
            assert set(children) == {"gateway", "verify_service", "draft_service"}
            os.kill(children["draft_service"], signal.SIGKILL)
            assert complete(urls["HTTP"]) == text
            eventually(
                lambda: (
                    children_of(process.pid).get("draft_service")
                    not in (None, children["draft_service"])
                )
            )

            os.kill(children["verify_service"], signal.SIGKILL)
            eventually(
                lambda: (
                    children_of(process.pid).get("verify_service")
                    not in (None, children["verify_service"])
                )
            )

            def answers_again() -> bool:
                try:
                    return complete(urls["HTTP"]) == text
                except OSError:
                    return False

            eventually(answers_again)
            children = children_of(process.pid)
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=120)
            assert process.returncode == 0, log
            for name in ("gateway", "verify", "draft"):
                assert re.search(rf"^ *{name} │ ", log, re.M)
            assert "draft was killed by SIGKILL; restarting" in log
        assert not any(map(is_alive, children.values()))
        assert list(runtime.iterdir()) == []
    finally:
        shutil.rmtree(runtime)


def test_it_serves_on_when_nobody_reads_its_output(checkpoint: Path) -> None:
    port = free_port()
    with serving(checkpoint, f"--port={port}") as process:
        assert process.stdout
        process.stdout.close()
        eventually(lambda: is_served(port))
        draft = children_of(process.pid)["draft_service"]
        os.kill(draft, signal.SIGKILL)
        eventually(lambda: children_of(process.pid).get("draft_service") not in (None, draft))
        assert complete(f"http://127.0.0.1:{port}")
        process.terminate()
        assert process.wait(120) == 0


def is_served(port: int) -> bool:
    try:
        return bool(complete(f"http://127.0.0.1:{port}"))
    except OSError:
        return False


def test_lines_for_nobody_end_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", closefd=False) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        terminal = Terminal()
        for _ in range(2):
            terminal.line("draft", "a line")
        terminal.error("the last word")
        monkeypatch.undo()
        with open(os.devnull, "w") as sink:
            os.dup2(sink.fileno(), writer)  # what is left can be written
    os.close(writer)


def test_a_full_disk_under_the_log_stops_nothing(checkpoint: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with serving(checkpoint, stderr=full) as process:
            assert complete(wait_until_ready(process)["HTTP"])
            process.terminate()
            assert process.wait(60) == 0
    finally:
        os.close(full)


def test_a_name_that_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    config = ServeConfig(served_model_name="модель")
    Terminal().ready({"http": "http://127.0.0.1:1", "grpc": "127.0.0.1:2"}, config)
    shown.seek(0)
    assert r"Foredraft serves \u043c\u043e\u0434\u0435\u043b\u044c" in shown.read()


def test_nothing_survives_kill_9_of_serve(checkpoint: Path) -> None:
    with serving(checkpoint, "--speculative-algorithm=NONE") as process:
        wait_until_ready(process)
        children = children_of(process.pid)
        assert set(children) == {"gateway", "verify_service"}
        process.kill()
        process.wait()
        eventually(lambda: not any(map(is_alive, children.values())))


def test_interrupted_while_starting_it_stops_quietly(checkpoint: Path) -> None:
    with serving(checkpoint) as process:
        children = eventually(lambda: children_of(process.pid))
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=120)
        assert process.returncode in (0, 130)
        assert "Traceback" not in log
    assert not any(map(is_alive, children.values()))


def test_a_broken_checkpoint_is_told_and_nothing_is_left(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "Broken"
    shutil.copytree(checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with serving(broken) as process:
        _, log = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "verify exited with status" in log
    assert "model.safetensors" in log
    assert children_of(process.pid) == {}


def test_a_missing_tokenizer_or_template_is_told(checkpoint: Path, tmp_path: Path) -> None:
    """The verifier needs neither."""
    mute = tmp_path / "Mute"
    shutil.copytree(checkpoint, mute)
    (mute / "tokenizer.json").unlink()
    (tmp_path / "broken.jinja").write_text("{% for %}")
    asked = (
        ((mute,), 1, "tokenizer.json: not found"),
        ((checkpoint, "--chat-template=/nowhere"), 2, "--chat-template /nowhere: "),
        ((checkpoint, f"--chat-template={tmp_path / 'broken.jinja'}"), 2, "does not compile"),
    )
    for arguments, status, said in asked:
        with serving(*arguments, "--speculative-algorithm=NONE") as process:
            _, log = process.communicate(timeout=120)
        assert process.returncode == status
        # What flags name is looked at before anything starts, what belongs to the model is the
        # gateway's to read.
        assert ("gateway exited with status 1" in log) == (status == 1)
        assert log.count(said) == 1 if status == 2 else said in log
        assert "Traceback" not in log
        assert children_of(process.pid) == {}


def test_json_logs_stay_objects(checkpoint: Path) -> None:
    with serving(checkpoint, "--log-format=json", "--speculative-algorithm=NONE") as process:
        assert process.stderr
        for line in process.stderr:
            entry = json.loads(line)
            if entry["message"].startswith("ready"):
                break
        assert entry["service"] == "serve"
        assert entry["http"].startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=120)
    assert out == ""
    assert all(json.loads(line) for line in log.splitlines())
