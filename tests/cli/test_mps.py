"""The MPS daemon of `foredraft serve --mps`, with a program in its place that does what it does: fork, wait for quit."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.cli import mps
from foredraft.cli.stack import make_supervisor

DAEMON = f"""#!{sys.executable}
import os, sys, pathlib
folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-d"]:
    (folder / "control").write_text("up")
elif sys.stdin.read() == "quit -t 5\\n" and (folder / "control").exists():
    pathlib.Path(os.environ["LOG"]).write_text("quit")
else:
    sys.exit(1)
"""


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / mps.CONTROL
    program.write_text(DAEMON)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_it_runs_in_a_private_directory_and_is_told_to_quit(daemon):
    with mps.running(True) as variables:
        folder = Path(variables["CUDA_MPS_PIPE_DIRECTORY"])
        assert (folder / "control").exists()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not daemon.exists()
    assert daemon.read_text() == "quit"
    assert not folder.exists()


def test_without_the_program_it_warns_what_that_costs(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with mps.running(True) as variables:
        assert variables == {}
    assert "0.16 ms" in caplog.text


def test_a_daemon_that_does_not_start_is_named(daemon, caplog):
    program = daemon.parent / mps.CONTROL
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no device')\n")
    with mps.running(True) as variables:
        assert variables == {}
    assert "no device" in caplog.text
    assert subprocess.run([program, "-d"], check=False, capture_output=True).returncode != 0


def test_a_stack_ends_its_daemon(daemon):
    stack = make_supervisor({"mps": True, "port": 0, "grpc_port": 0})
    devices = {service.name: "--device=cuda" in service.command for service in stack.services}
    assert devices == {"gateway": False, "verify": True, "draft": True}
    assert not daemon.exists()
    stack.stop()
    assert daemon.read_text() == "quit"
