"""The MPS daemon of `foredraft serve --mps`, with a program in its place that does what it does:
fork, wait for quit.
"""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from foredraft.cli import mps, stack
from testing.stack import eventually

DAEMON = f"""#!{sys.executable}
import os, sys, pathlib
folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-d"]:
    (folder / "control").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    sys.exit()
words = sys.stdin.read()
if words == "quit -t 5\\n" and (folder / "control").exists():
    pathlib.Path(os.environ["LOG"]).write_text("quit")
elif words == f"start_server -uid {{os.getuid()}}\\n":
    pathlib.Path(os.environ["LOG"]).with_suffix(".server").touch()
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
        # The server starts before a client asks for it.
        eventually(daemon.with_suffix(".server").exists)
    assert daemon.read_text() == "quit"
    assert not folder.exists()


@pytest.mark.parametrize(("visible", "numbers"), [("3", "0"), ("2,5", "0,1"), ("GPU-8c", "0")])
def test_clients_name_cards_by_the_daemons_numbers(daemon, monkeypatch, visible, numbers):
    """A daemon that may see card 3 alone calls it 0: a client that asks for 3 would find none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with mps.running(True) as variables:
        assert variables["CUDA_VISIBLE_DEVICES"] == numbers
        folder = Path(variables["CUDA_MPS_PIPE_DIRECTORY"])
        assert (folder / "control").read_text() == visible
    assert daemon.read_text() == "quit"


def test_the_daemon_of_a_process_that_was_killed_is_ended_by_the_next(
    daemon, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os; from foredraft.cli.mps import Mps; Mps().start(); os._exit(9)"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)})
    [left] = tmp_path.glob("foredraft-mps-*")
    assert (left / "control").exists()
    assert not daemon.exists()
    with mps.running(True) as variables:
        assert daemon.read_text() == "quit"
        assert not left.exists()
        assert Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).exists()


def test_a_daemon_that_hangs_at_its_start_is_given_up(daemon, caplog, monkeypatch):
    program = daemon.parent / mps.CONTROL
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    monkeypatch.setattr(mps, "SECONDS", 0.2)
    with mps.running(True) as variables:
        assert variables == {}
    assert "nothing after 0.2 s" in caplog.text


def test_a_signal_while_a_stack_is_made_leaves_no_daemon(daemon, monkeypatch):
    def interrupted(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stack, "LocalStack", interrupted)
    monkeypatch.setattr(tempfile, "tempdir", str(daemon.parent))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(daemon.parent))
    with pytest.raises(KeyboardInterrupt):
        stack.make_supervisor({"mps": True, "port": 0, "grpc_port": 0})
    assert daemon.read_text() == "quit"
    assert not list(daemon.parent.glob("foredraft-*"))


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
    made = stack.make_supervisor({"mps": True, "port": 0, "grpc_port": 0})
    devices = {service.name: "--device=cuda" in service.command for service in made.services}
    assert devices == {"gateway": False, "verify": True, "draft": True}
    assert not daemon.exists()
    made.stop()
    assert daemon.read_text() == "quit"
