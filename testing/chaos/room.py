"""A mount namespace of the suite's own, with a small /dev/shm and a small disk that may be filled
without harm to others.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "FOREDRAFT_CHAOS_ROOM"
SHM = Path("/dev/shm")
SHM_BYTES = 24 * 2**20
DISK_BYTES = 2 * 2**20
DISK_INODES = 64
_CHUNK = bytes(2**16)


def enter(arguments: Sequence[str]) -> str:
    """Runs this program again inside a room, in place of this process.

    Returns:
        Why there can be none; empty when this process is inside.
    """
    if VARIABLE in os.environ:
        return ""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    unshare = ["unshare", *as_root, "--mount", "--propagation", "private", "--"]
    trial = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(SHM)]
    try:
        tried = subprocess.run([*unshare, *trial], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no mount namespace: {error}"
    if tried.returncode != 0:
        return f"no mount namespace: {tried.stderr.strip() or tried.returncode}"
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix="chaos-disk-")
    command = [*unshare, sys.executable, *arguments]
    sys.stdout.flush()
    os.execvp(command[0], command)


class Room:
    """The two small file systems.

    Outside a namespace a plain directory stands for the disk, and nothing may be filled.
    """

    def __init__(self) -> None:
        self.is_private = VARIABLE in os.environ
        self.disk = Path(os.environ.get(VARIABLE) or tempfile.mkdtemp(prefix="chaos-disk-"))
        if self.is_private:
            _mount(SHM, f"size={SHM_BYTES},mode=1777")
            _mount(self.disk, f"size={DISK_BYTES},nr_inodes={DISK_INODES},mode=700")

    def close(self) -> None:
        """Removes the directory under the disk; the kernel frees the rest with the namespace."""
        if self.is_private:
            subprocess.run(["umount", "--lazy", str(self.disk)], check=False)
            self.disk.rmdir()

    def fill(self, folder: Path) -> None:
        """Fills one of the two file systems to the last byte and inode.

        Raises:
            RuntimeError: It is not the suite's own.
        """
        status = os.statvfs(folder)
        if not self.is_private or status.f_frsize * status.f_blocks > SHM_BYTES:
            raise RuntimeError(f"{folder} is not ours to fill")
        try:
            with (folder / "chaos-0").open("wb", buffering=0) as file:
                while file.write(_CHUNK):
                    pass
        except OSError:
            pass
        try:
            for number in range(1, DISK_INODES + 1):
                (folder / f"chaos-{number}").touch()
        except OSError:
            pass

    def free(self, folder: Path) -> None:
        """Undoes `fill`."""
        for path in folder.glob("chaos-*"):
            path.unlink()

    def segments(self) -> list[str]:
        """Returns names of Foredraft's shared-memory segments; excludes other stacks' only
        where the room is private.
        """
        return [path.name for path in SHM.glob("foredraft-*")] if self.is_private else []


def _mount(where: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)], check=True)
