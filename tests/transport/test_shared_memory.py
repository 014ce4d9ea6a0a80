"""Segments in /dev/shm: what is in them, who may open them, and that none is ever left."""

import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import InvalidRequest
from foredraft.transport import choice, shared_memory
from foredraft.transport.base import HiddenReader, HiddenWriter
from foredraft.transport.rows import ArenaError, RowFormat
from foredraft.transport.shared_memory import SharedMemoryReader, SharedMemoryWriter
from testing.segments import num_descriptors, segments

ROOT = Path(__file__).parents[2]
ROW = RowFormat(48, torch.float32)
EPOCH = 7

pytestmark = pytest.mark.skipif(not shared_memory.is_supported(), reason="needs /dev/shm")


@pytest.fixture
def writer() -> Iterator[SharedMemoryWriter]:
    writer = SharedMemoryWriter(ROW, 10, EPOCH)
    yield writer
    writer.close()
    assert not segments()


def ends(
    transport: tensor_pb2.Transport, row: RowFormat, capacity: int
) -> tuple[HiddenWriter, HiddenReader]:
    writer = choice.open_writer([transport], row, capacity, EPOCH)
    arena = tensor_pb2.Arena.FromString(writer.arena.SerializeToString())
    reader = choice.open_reader(arena, row, EPOCH)
    writer.attached()
    return writer, reader


@pytest.mark.parametrize("transport", [tensor_pb2.TRANSPORT_SHM, tensor_pb2.TRANSPORT_INLINE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_arrive_as_they_were_written(
    transport: tensor_pb2.Transport, dtype: torch.dtype
) -> None:
    row = RowFormat(24, dtype)
    writer, reader = ends(transport, row, 16)
    for step in range(1, 40):
        count = 1 + step * 7 % 16
        rows = torch.randn(count, 24)  # float32: written in the row's own type
        message = draft_pb2.HiddenRows.FromString(writer.write(rows).SerializeToString())
        writer.sent(step)
        assert torch.equal(reader.read(message), rows.to(dtype))
        writer.answered(step)
    reader.close()
    writer.close()


def test_messages_do_not_grow_with_the_rows_width() -> None:
    sizes = []
    for width in (64, 8192):
        writer, reader = ends(tensor_pb2.TRANSPORT_SHM, RowFormat(width, torch.float32), 64)
        sizes.append(writer.write(torch.randn(64, width)).ByteSize())
        reader.close()
        writer.close()
    assert sizes[0] == sizes[1] < 10


def test_64_mb_pass_through_a_16_mb_arena() -> None:
    row = RowFormat(4096, torch.float32)
    writer, reader = ends(tensor_pb2.TRANSPORT_SHM, row, (16 << 20) // row.num_bytes)
    assert writer.arena.size <= (16 << 20) + 4096
    left, step, total = (64 << 20) // row.num_bytes, 0, 0.0
    rows = torch.arange(left, dtype=torch.float32)[:, None].expand(left, 4096)
    read = []
    while left:
        count = min(left, writer.num_free, 300)
        message = writer.write(rows[len(rows) - left :][:count])
        step += 1
        writer.sent(step)
        left -= count
        got = reader.read(message)
        read += got[:, 0].tolist()
        total += float((got[:, :1] - got).abs().sum())
        writer.answered(step)
    assert read == list(range(len(rows)))
    assert total == 0.0
    reader.close()
    writer.close()


def test_a_segment_is_private_and_has_no_name_once_both_have_it(
    writer: SharedMemoryWriter,
) -> None:
    (name,) = segments()
    status = os.stat(f"/dev/shm/{name}")
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.getuid()
    assert status.st_size == writer.arena.size
    reader = SharedMemoryReader(writer.arena, ROW, EPOCH)
    writer.attached()
    assert not segments()
    rows = torch.randn(4, 48)
    assert torch.equal(reader.read(writer.write(rows)), rows)
    reader.close()


def test_a_draft_cannot_write(writer: SharedMemoryWriter) -> None:
    reader = SharedMemoryReader(writer.arena, ROW, EPOCH)
    with pytest.raises(TypeError):
        reader._map[0:1] = b"x"
    reader.close()


def test_a_mapping_outlives_the_writer(writer: SharedMemoryWriter) -> None:
    reader = SharedMemoryReader(writer.arena, ROW, EPOCH)
    rows = torch.randn(4, 48)
    message = writer.write(rows)
    writer.close()
    assert torch.equal(reader.read(message), rows)
    reader.close()
    with pytest.raises(InvalidRequest, match="ended"):
        reader.read(message)
    with pytest.raises(ArenaError, match="ended"):
        writer.write(rows)


def other_handle(arena: tensor_pb2.Arena, handle: bytes) -> None:
    arena.handle = handle


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda a: other_handle(a, b"../../etc/passwd"), "handle"),
        (lambda a: other_handle(a, b""), "handle"),
        (lambda a: other_handle(a, b"\xff"), "handle"),
        (lambda a: other_handle(a, a.handle[:-1] + b"!"), "handle"),
        (lambda a: other_handle(a, b"foredraft-1-1-1-0123456789abcdef"), "handle"),
        (lambda a: setattr(a, "size", a.size + 1), "size"),
        (lambda a: setattr(a, "size", 4096), "size"),
        (lambda a: setattr(a, "size", 0), "size"),
        (lambda a: setattr(a, "epoch", 8), "epoch"),
        (lambda a: setattr(a, "transport", tensor_pb2.TRANSPORT_CUDA_IPC), "transport"),
        (lambda a: setattr(a, "transport", 99), "transport"),
        (lambda a: a.ClearField("tensors"), "tensors"),
        (lambda a: setattr(a.tensors[0], "name", "other"), "tensors"),
        (lambda a: setattr(a.tensors[0], "offset", 4097), "tensors"),
        (lambda a: setattr(a.tensors[0], "offset", 0), "tensors"),
        (lambda a: setattr(a.tensors[0], "offset", 2**63), "size"),
        (lambda a: setattr(a.tensors[0], "dtype", tensor_pb2.DATA_TYPE_FLOAT16), "tensors"),
        (lambda a: a.tensors[0].shape.append(1), "tensors"),
        (lambda a: a.tensors[0].shape.__setitem__(0, 11), "size"),
        (lambda a: a.tensors[0].shape.__setitem__(0, 0), "tensors"),
        (lambda a: a.tensors[0].shape.__setitem__(0, 2**63), "size"),
        (lambda a: a.tensors[0].shape.__setitem__(1, 47), "tensors"),
    ],
)
def test_a_bad_description_is_refused_by_field(
    writer: SharedMemoryWriter, change: Callable[[tensor_pb2.Arena], object], field: str
) -> None:
    arena = tensor_pb2.Arena()
    arena.CopyFrom(writer.arena)
    change(arena)
    with pytest.raises(ArenaError) as raised:
        choice.open_reader(arena, ROW, EPOCH)
    assert raised.value.field == field


def test_a_process_without_descriptors_refuses(writer: SharedMemoryWriter) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The next descriptor is the last one: enough to open the segment, not to map it.
    with open(os.devnull) as last:
        limit = last.fileno() + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with pytest.raises(ArenaError, match="cannot map"):
            SharedMemoryReader(writer.arena, ROW, EPOCH)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    SharedMemoryReader(writer.arena, ROW, EPOCH).close()


def test_an_older_attachs_segment_is_refused(writer: SharedMemoryWriter) -> None:
    arena = tensor_pb2.Arena()
    arena.CopyFrom(writer.arena)
    arena.epoch = EPOCH + 1
    with pytest.raises(ArenaError, match="not of this attach"):
        SharedMemoryReader(arena, ROW, EPOCH + 1)


def test_a_link_in_the_segments_place_is_not_followed(
    writer: SharedMemoryWriter, tmp_path: Path
) -> None:
    (name,) = segments()
    path = Path("/dev/shm") / name
    path.unlink()
    target = tmp_path / "file"
    target.write_bytes(bytes(writer.arena.size))
    path.symlink_to(target)
    with pytest.raises(ArenaError, match="handle"):
        SharedMemoryReader(writer.arena, ROW, EPOCH)


@pytest.mark.parametrize(
    "rows",
    [
        draft_pb2.HiddenRows(arena_row=10, num_rows=1),
        draft_pb2.HiddenRows(arena_row=0, num_rows=11),
        draft_pb2.HiddenRows(arena_row=2**32 - 1, num_rows=2**32 - 1),
        draft_pb2.HiddenRows(num_rows=1),
        draft_pb2.HiddenRows(inline=tensor_pb2.Tensor(), num_rows=1),
    ],
)
def test_rows_outside_the_ring_are_refused(
    writer: SharedMemoryWriter, rows: draft_pb2.HiddenRows
) -> None:
    reader = SharedMemoryReader(writer.arena, ROW, EPOCH)
    with pytest.raises(InvalidRequest, match="hidden"):
        reader.read(rows)
    reader.close()


def test_no_room_means_another_transport(caplog: pytest.LogCaptureFixture) -> None:
    row = RowFormat(1 << 20, torch.float32)
    capacity = 1 << 26  # 256 TiB
    with pytest.raises(ArenaError, match="--shm-size"):
        choice.open_writer([tensor_pb2.TRANSPORT_SHM], row, capacity, EPOCH)
    assert not caplog.text, "a verifier tries again every second"
    writer = choice.open_writer(choice.supported(), row, capacity, EPOCH)
    assert "inline instead of shm" in caplog.text
    assert writer.arena.transport == tensor_pb2.TRANSPORT_INLINE
    assert writer.capacity * row.num_bytes <= 32 << 20  # what one message may carry
    assert not segments()


def test_what_dead_processes_left_is_removed_and_nothing_else() -> None:
    code = (
        "import torch, sys, time\n"
        "from foredraft.transport.base import RowFormat\n"
        "from foredraft.transport.shared_memory import SharedMemoryWriter\n"
        "writer = SharedMemoryWriter(RowFormat(8, torch.float32), 4, 1)\n"
        "print('made', flush=True)\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"made\n"
        assert len(segments(child.pid)) == 1
        own = SharedMemoryWriter(ROW, 4, EPOCH)
        shared_memory.remove_leftovers()
        assert len(segments(child.pid)) == 1, "its process lives"
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie is dead too
        other = Path(f"/dev/shm/foredraft-of-somebody-else-{os.getpid()}")
        other.touch()
        shared_memory.remove_leftovers()
        assert not segments(child.pid)
        assert len(segments()) == 1
        assert other.exists()
        other.unlink()
        own.close()
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_a_later_process_of_the_same_pid_is_another_one() -> None:
    name = shared_memory._new_name()
    prefix, pid, start, rest = name.split("-", 3)
    stale = Path("/dev/shm") / f"{prefix}-{pid}-{int(start) - 1}-{rest}"
    stale.touch()
    shared_memory.remove_leftovers()  # unless a verifier of another test's did
    assert not stale.exists()


def test_a_thousand_attaches_leave_nothing() -> None:
    writer, reader = ends(tensor_pb2.TRANSPORT_SHM, ROW, 64)
    descriptors = num_descriptors("/dev/shm/")
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(1000):
        reader.close()
        writer.close()
        writer, reader = ends(tensor_pb2.TRANSPORT_SHM, ROW, 64)
        reader.read(writer.write(torch.zeros(3, 48)))
    assert num_descriptors("/dev/shm/") == descriptors
    assert abs(len(Path("/proc/self/maps").read_text().splitlines()) - mappings) < 20
    reader.close()
    writer.close()
    assert not segments()
