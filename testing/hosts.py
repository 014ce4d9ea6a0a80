"""Host 1 of a verifier whose ranks are on two hosts, as a process of this machine.

Also a program: `python -m testing.hosts FLAGS` is `foredraft serve FLAGS` with forked services.
"""

import concurrent.futures
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from foredraft.cli import main
from foredraft.cli.supervisor import Supervisor
from testing.forked import forked

ROOT = Path(__file__).parents[1]


class Host:
    """Host 1: `foredraft serve` there, and what it logs.

    Args:
        flags: Flags of `foredraft serve`.
        before: What begins its command line.
        variables: Environment variables of its own.
        is_forked: Whether its services are forked, which the device must be a CPU for.
    """

    def __init__(
        self,
        flags: Sequence[str],
        before: Sequence[str] = (),
        variables: Mapping[str, str] = {},
        is_forked: bool = False,
    ) -> None:
        program = ["testing.hosts"] if is_forked else ["foredraft.cli.main", "serve"]
        command = [*before, sys.executable, "-m", *program, *flags]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variables},
        )
        self._reader = concurrent.futures.ThreadPoolExecutor(1)
        self._reader.submit(self._read)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        self.process.wait(120)
        self._reader.shutdown()
        print("".join(f"host 1: {line}" for line in self.lines))


def other_ranks(lines: list[str]) -> list[int]:
    """Processes on host 1, by what rank 0 has logged last."""
    [*_, joined] = [line for line in lines if "ranks have joined" in line]
    return [int(pid) for pid in re.findall(r"pid (\d+) on ", joined)]


if __name__ == "__main__":
    Supervisor.launch = staticmethod(forked)  # type: ignore[assignment, method-assign]
    sys.exit(main.main(["serve", *sys.argv[1:]]))
