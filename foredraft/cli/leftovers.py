"""Finds directories named after the pid of their process, where the process died without
removing them.
"""

import os
from pathlib import Path


def of_the_dead(base: Path, prefix: str) -> list[Path]:
    """Returns this user's directories `PREFIX` + pid + `-...` in `base` whose processes are
    gone.
    """
    found = []
    for path in base.glob(f"{prefix}*-*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)) and _is_own(path):
            found.append(path)
    return found


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except FileNotFoundError:  # another process removes them too
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
