"""Reads processes from the kernel: descendants, descriptors, threads, memory. Linux only."""

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

SERVICES = {"gateway": "gateway", "verify_service": "verify", "draft_service": "draft"}
_SEGMENT = re.compile(r"/dev/shm/foredraft-")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources of one process.

    Attributes:
        segments: Number of mapped shared-memory segments of Foredraft.
    """

    descriptors: int
    threads: int
    memory_mib: float
    segments: int


def descendants(pid: int) -> list[int]:
    """Returns children of a process, their children and so on, zombies included."""
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
    """Returns "gateway", "verify" or "draft"; else the command line, which is empty for a
    zombie.
    """
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if "-m" in command:
        module = command[command.index("-m") + 1]
        return SERVICES.get(module, module)
    return " ".join(command).strip()


def marked(variable: str, value: str) -> list[int]:
    """Returns the processes that were started with a variable in their environment, whatever
    their parent is now.
    """
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
    """Returns whether a process runs; a zombie does not."""
    try:
        return _fields(pid)[0] not in "ZX"
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    """Returns user and system time of a process with its descendants, from proc_pid_stat(5)."""
    ticks = 0
    for one in (pid, *descendants(pid)):
        fields = _fields(one)
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def footprint(pid: int) -> Footprint:
    """Returns the present resources of a process.

    Raises:
        OSError: The process is gone.
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
    """Returns the fields of proc_pid_stat(5) from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _line(status: str, name: str) -> str:
    return next(
        line.partition(":")[2].strip() for line in status.splitlines() if line.startswith(name)
    )
