"""Hidden states in a POSIX shared-memory segment: for a draft on the same host.

A segment is a file in /dev/shm, made and mapped here rather than by multiprocessing.shared_memory,
whose resource tracker would unlink in one process what another one owns. The verifier writes; the
draft maps it read-only. Linux only.
"""

import errno
import logging
import mmap
import os
import re
import secrets
import stat
import struct
from pathlib import Path

import numpy as np
import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import InvalidRequest
from foredraft.transport import codec
from foredraft.transport.base import HiddenReader, RingWriter, check_ring, check_rows
from foredraft.transport.layout import describe, ring_spec
from foredraft.transport.process import pid_namespace, start_time
from foredraft.transport.rows import ArenaError, RowFormat

FOLDER = Path("/dev/shm")
# Pid, its start time, pid namespace.
_NAME = re.compile(r"foredraft-(\d+)-(\d+)-(\d+)-[0-9a-f]{16}")
_HEADER = struct.Struct("<8sQQ")  # magic, epoch, size of the segment
_MAGIC = b"foredra1"
_FIRST_ROW = mmap.PAGESIZE  # offset of row 0, behind the header

logger = logging.getLogger(__name__)


def is_supported() -> bool:
    """Returns whether this machine supports POSIX shared-memory segments."""
    return FOLDER.is_dir() and Path("/proc/self/stat").exists()


class SharedMemoryWriter(RingWriter):
    """Makes a new segment, which has a name until `attached`.

    Args:
        row: Format of the rows.
        capacity: Rows of the ring.
        epoch: Number of the attach.

    Raises:
        ArenaError: The segment cannot be made; /dev/shm is full, say.
    """

    def __init__(self, row: RowFormat, capacity: int, epoch: int) -> None:
        super().__init__(row, capacity)
        self.arena = describe(
            tensor_pb2.TRANSPORT_SHM, epoch, [ring_spec(row, capacity)], _FIRST_ROW
        )
        size = self.arena.size
        try:
            self._path = FOLDER / _new_name()
            self._map: mmap.mmap | None = _create(self._path, size)
        except OSError as error:
            raise ArenaError("size", f"no segment of {size} bytes: {_why(error)}") from error
        _HEADER.pack_into(self._map, 0, _MAGIC, epoch, size)
        self._rows: np.ndarray | None = np.frombuffer(
            self._map, dtype=np.uint8, offset=_FIRST_ROW
        ).reshape(capacity, row.num_bytes)
        self.arena.handle = self._path.name.encode()

    def attached(self) -> None:
        """Takes the segment's name away, so that it ends with the two processes."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Frees the segment as soon as a write that may be under way in another thread has
        ended.
        """
        self.attached()
        self._rows = self._map = None

    def _store(self, first: int, rows: list[torch.Tensor]) -> None:
        ring = self._rows
        if ring is None:
            raise ArenaError("epoch", f"attach {self.arena.epoch} has ended")
        joined = rows[0] if len(rows) == 1 else torch.cat(rows)
        data = codec.raw(joined).numpy().reshape(len(joined), self.row.num_bytes)
        fitting = min(len(data), self.capacity - first)
        ring[first : first + fitting] = data[:fitting]
        ring[: len(data) - fitting] = data[fitting:]


class SharedMemoryReader(HiddenReader):
    """Maps a segment read-only.

    Args:
        arena: The verifier's description of the segment.
        row: Format of the rows.
        epoch: Number of the attach.

    Raises:
        ArenaError: The description contradicts itself, the segment, or this attach.
    """

    def __init__(self, arena: tensor_pb2.Arena, row: RowFormat, epoch: int) -> None:
        offset, capacity = check_ring(arena, row, epoch, _HEADER.size)
        self._row = row
        self._map: mmap.mmap | None = _open(arena)
        if _HEADER.unpack_from(self._map) != (_MAGIC, epoch, arena.size):
            self._map.close()
            raise ArenaError("epoch", "the segment is not of this attach")
        self._rows: np.ndarray | None = np.frombuffer(
            self._map, dtype=np.uint8, count=capacity * row.num_bytes, offset=offset
        ).reshape(capacity, row.num_bytes)

    def read(self, rows: draft_pb2.HiddenRows) -> torch.Tensor:
        """Returns rows of the ring."""
        ring = self._rows
        if ring is None:
            raise InvalidRequest("hidden", "the attach has ended")
        capacity = len(ring)
        first, num_rows = check_rows(rows, capacity)
        data = np.empty((num_rows, self._row.num_bytes), dtype=np.uint8)
        fitting = min(num_rows, capacity - first)
        data[:fitting] = ring[first : first + fitting]
        data[fitting:] = ring[: num_rows - fitting]
        return torch.from_numpy(data).view(self._row.dtype)

    def close(self) -> None:
        """Unmaps the segment, once the traceback of a failed read has released it too."""
        self._rows = self._map = None


def remove_leftovers() -> int:
    """Unlinks segments whose verifier died before its draft had mapped them; returns how many.

    A process in another pid namespace cannot be told from a dead one, so its segments stay.
    """
    if not is_supported():
        return 0
    removed = 0
    for path in FOLDER.glob("foredraft-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[3]) != pid_namespace():
            continue
        try:
            if start_time(int(match[1])) == int(match[2]):
                continue
            path.unlink()
            removed += 1
        except OSError as error:  # another user's, or gone already, or nothing can be known
            logger.debug("left %s: %s", path, error)
    return removed


def _new_name() -> str:
    pid = os.getpid()
    return f"foredraft-{pid}-{start_time(pid)}-{pid_namespace()}-{secrets.token_hex(8)}"


def _why(error: OSError) -> str:
    """Explains why a segment cannot be made, and how to remedy it.

    A container has 64 MiB of /dev/shm unless it is given more.
    """
    if error.errno != errno.ENOSPC:
        return str(error)
    room = os.statvfs(FOLDER)
    free, total = (blocks * room.f_frsize / 2**20 for blocks in (room.f_bavail, room.f_blocks))
    return (
        f"{FOLDER} has {free:.0f} of {total:.0f} MiB left; give its container more (docker run"
        " --shm-size, Kubernetes: an emptyDir of medium Memory there), or lower --arena-mb"
    )


def _create(path: Path, size: int) -> mmap.mmap:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        # Without its pages reserved, a full /dev/shm would be a SIGBUS at some later write.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _open(arena: tensor_pb2.Arena) -> mmap.mmap:
    name = arena.handle.decode("ascii", "replace")
    if not _NAME.fullmatch(name):
        raise ArenaError("handle", f"{name!r} is not the name of a segment")
    try:
        descriptor = os.open(FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise ArenaError("handle", f"cannot open the segment: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != arena.size:
            raise ArenaError("size", f"the segment has {status.st_size} bytes, not {arena.size}")
        return mmap.mmap(descriptor, arena.size, prot=mmap.PROT_READ)
    except OSError as error:  # mmap takes a descriptor of its own, and there may be none left
        raise ArenaError("handle", f"cannot map the segment: {error.strerror}") from error
    finally:
        os.close(descriptor)
