"""A second host for ranks: a process group that shares no memory with this one, in a network
namespace of its own where this machine allows that.
"""

import concurrent.futures
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMESPACE = f"foredraft-{os.getpid()}"
# A network interface's name has 15 letters, and tests may run beside each other.
LINKS = (f"fd{os.getpid()}a", f"fd{os.getpid()}b")
ADDRESSES = tuple(f"10.231.{os.getpid() % 250}.{host}" for host in (1, 2))


@contextlib.contextmanager
def other_host() -> Iterator[tuple[str, list[str]]]:
    """Gives the address of host 0, and what begins the command line of a process on host 1."""
    steps = [
        f"ip netns add {NAMESPACE}",
        f"ip link add {LINKS[0]} type veth peer name {LINKS[1]} netns {NAMESPACE}",
        f"ip addr add {ADDRESSES[0]}/24 dev {LINKS[0]}",
        f"ip link set {LINKS[0]} up",
        f"ip -n {NAMESPACE} addr add {ADDRESSES[1]}/24 dev {LINKS[1]}",
        f"ip -n {NAMESPACE} link set {LINKS[1]} up",
        f"ip -n {NAMESPACE} link set lo up",
    ]
    try:
        for step in steps:
            subprocess.run(step.split(), check=True, capture_output=True)
        inside = f"ip netns exec {NAMESPACE} unshare -m sh -c"
        mounts = "mount -t tmpfs none /dev/shm && mount -t tmpfs none /run"
        subprocess.run([*inside.split(), mounts], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield "127.0.0.1", []
    else:
        yield ADDRESSES[0], [*inside.split(), f'{mounts} && exec "$@"', "host1"]
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "del", NAMESPACE], check=False, capture_output=True)


class Host:
    """Host 1: `foredraft serve` there, and what it logs.

    Args:
        before: What begins the command line of a process there.
        flags: Flags of `serve`.
        environment: Variables beside this process's own.
    """

    def __init__(
        self, before: list[str], *flags: str, environment: Mapping[str, str] | None = None
    ) -> None:
        command = [*before, sys.executable, "-m", "foredraft.cli.main", "serve", *flags]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
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
