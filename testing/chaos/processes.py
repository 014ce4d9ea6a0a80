"""What the kernel says of processes: descendants, descriptors, threads, memory. Linux only."""

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

SERVICES = {"gateway": "gateway", "verify_service": "verify", "draft_service": "draft"}
_SEGMENT = re.compile(r"/dev/shm/foredraft-")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds.

    Attributes:
        segments: Mapped shared-memory segments of Foredraft's.
    """

    descriptors: int
    threads: int
    memory_mib: float
    segments: int


def descendants(pid: int) -> list[int]:
    """Children of a process, their children and so on, zombies included."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parents[int(path.name)] = int(_fields(int(path.name))[1])
            except OSError:
                continue
    found, news = [], [pid]
    while news:
        news = [child for child, parent in parents.items() if parent in news]
        found += news
    return found


def service_of(pid: int) -> str:
    """ "gateway", "verify" or "draft"; else the command line, which is empty for a zombie."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if "-m" in command:
        module = command[command.index("-m") + 1]
        return SERVICES.get(module, module)
    return " ".join(command).strip()


def marked(variable: str, value: str) -> list[int]:
    """Processes that were started with a variable in their environment, whoever is their parent by now."""
    needle, found = f"{variable}={value}".encode(), []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            if needle in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return _fields(pid)[0] not in "ZX"
    except OSError:
        return False


def footprint(pid: int) -> Footprint:
    """What it holds now.

    Raises:
        OSError: It is gone.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    maps = Path(f"/proc/{pid}/maps").read_text()
    return Footprint(
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(_line(status, "Threads")),
        memory_mib=int(_line(status, "VmRSS").split()[0]) / 1024,
        segments=len(_SEGMENT.findall(maps)),
    )


def limit_descriptors(pid: int, number: int | None) -> None:
    """Bounds the descriptors of a running process; None lifts the bound again."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard if number is None else number, hard))


def _fields(pid: int) -> list[str]:
    """From the state on, as proc_pid_stat(5) numbers them."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _line(status: str, name: str) -> str:
    return next(
        line.partition(":")[2].strip() for line in status.splitlines() if line.startswith(name)
    )
