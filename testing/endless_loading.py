"""Services whose model never comes to be loaded."""

import signal
import subprocess
import sys
from pathlib import Path

from testing.stack import eventually
from testing.tools import ROOT


def signalled_while_it_loads(
    module: str, loader: str, socket: Path, number: signal.Signals
) -> tuple[int, str]:
    """Sends a service a signal while it loads its model, and waits until it has ended.

    Args:
        module: The service's package.
        loader: Function of its `__main__` that loads the model, and here never returns.
        socket: Address of its gRPC.
        number: The signal.

    Returns:
        Its exit status, and the last line of its log.
    """
    program = (
        f"import sys, time, {module}.__main__ as main\n"
        "def load(*_): print('loading', flush=True), time.sleep(3600)\n"
        f"main.{loader} = load\n"
        "sys.exit(main.main())"
    )
    command = [sys.executable, "-c", program, "--listen", f"unix:{socket}"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "loading\n"
        eventually(socket.exists)
        process.send_signal(number)
        try:
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, log.splitlines()[-1]
