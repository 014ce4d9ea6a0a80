"""Ends of a draft's process."""

import signal
import subprocess
import sys
from pathlib import Path

from testing.stack import eventually
from testing.tools import ROOT


def test_one_that_is_stopped_while_it_loads_ends_at_once(tmp_path: Path) -> None:
    socket = tmp_path / "draft.sock"
    program = (
        "import sys, time, draft_service.__main__ as main\n"
        "def load(*_): print('loading', flush=True), time.sleep(3600)\n"
        "main.create_drafter = load\n"
        "sys.exit(main.main())"
    )
    command = [sys.executable, "-c", program, "--listen", f"unix:{socket}"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "loading\n"
        eventually(socket.exists)
        process.send_signal(signal.SIGTERM)
        try:
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert log.splitlines()[-1].endswith("SIGTERM: stopping")
    assert not socket.exists()
