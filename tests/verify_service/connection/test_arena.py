"""Exchange regions by attach: which transport, how large, and when they end."""

import mmap
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import AttachRefused, DraftError, Overloaded
from foredraft.rpc.address import parse
from foredraft.telemetry.metrics import value
from foredraft.transport import choice, cuda, shared_memory
from foredraft.transport.base import HiddenWriter, Region
from foredraft.transport.device_exchange import StepSizes
from foredraft.transport.process import pid_namespace, start_time
from foredraft.transport.rows import ArenaError, RowFormat
from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.engines import Job
from testing.hidden_drafts import HiddenDrafter, engine_with
from testing.segments import segments
from testing.stack import eventually
from verify_service.connection.arena import Arena

SHM, INLINE = tensor_pb2.TRANSPORT_SHM, tensor_pb2.TRANSPORT_INLINE
CUDA_IPC = tensor_pb2.TRANSPORT_CUDA_IPC


def make(draft: str = "unix:/tmp/draft.sock", **changes: object) -> Arena:
    limits = {"max_bytes": 1 << 20, "useful_rows": 100, "required": "any", **changes}
    return Arena(draft, hidden_size=64, num_layers=4, **limits)


def info(**needs: object) -> draft_pb2.GetDraftInfoResponse:
    hidden = {"width": 64, "dtype": tensor_pb2.DATA_TYPE_FLOAT32, **needs}
    return draft_pb2.GetDraftInfoResponse(
        hidden=draft_pb2.HiddenNeeds(**hidden), transports=[SHM, INLINE]
    )


@pytest.mark.parametrize(
    ("address", "same"),
    [
        ("unix:/tmp/x", True),
        ("localhost:1", True),
        ("127.0.0.1:1", True),
        ("127.8.9.1:1", True),
        ("[::1]:1", True),
        (":1", True),
        ("10.0.0.1:1", False),
        ("0.0.0.0:1", False),
        ("draft:1", False),
        ("[2001:db8::1]:1", False),
    ],
)
def test_only_addresses_of_this_host_are_on_it(address: str, same: bool) -> None:
    assert parse(address).is_local == same
    arena = make(address)
    assert arena.open(info(), 1).transport == (SHM if same else INLINE)
    arena.ended(1, None)


def test_each_attach_gets_a_region_of_its_own() -> None:
    arena = make()
    first = arena.open(info(), 1)
    assert first.epoch == 1
    assert len(segments()) == 1
    arena.attached(1)
    assert not segments()
    assert value("foredraft_arena_bytes") == first.size == 4096 + 100 * 256
    assert value("foredraft_draft_transport_info", transport="shm") == 1
    old = arena.exchange(1)
    arena.ended(1, None)
    assert value("foredraft_arena_bytes") == 0
    assert value("foredraft_draft_transport_info", transport="shm") == 0
    second = arena.open(info(), 2)
    assert second.handle != first.handle
    assert arena.exchange(1) is None
    arena.ended(1, None)  # late news change nothing
    assert arena.exchange(2) is not None
    with pytest.raises(ArenaError, match="ended"):
        old.writer.write(torch.zeros(1, 64))
    arena.ended(2, None)
    assert not segments()


def test_a_region_is_no_larger_than_allowed() -> None:
    arena = make(max_bytes=2560 + mmap.PAGESIZE)
    assert arena.open(info(), 1).tensors[0].shape == [10, 64]
    arena.ended(1, None)
    with pytest.raises(AttachRefused, match="--arena-mb"):
        make(max_bytes=100 + mmap.PAGESIZE).open(info(), 1)


def test_a_required_transport_is_the_only_one() -> None:
    assert make(required="inline").open(info(), 1).transport == INLINE
    told = "--require-transport shm: the verifier offers {}, the draft {}$"
    with pytest.raises(AttachRefused, match=told.format("inline", "shm, inline")):
        make("10.0.0.1:1", required="shm").open(info(), 1)
    without = info()
    del without.transports[0]
    with pytest.raises(AttachRefused, match=told.format("shm, inline", "inline")):
        make(required="shm").open(without, 1)
    assert make().open(without, 1).transport == INLINE


@pytest.mark.parametrize(
    ("needs", "field"),
    [
        ({"width": 65}, "hidden.width"),
        ({"width": 64, "layers": [1, 2]}, "hidden.width"),
        ({"width": 128, "layers": [1, 5]}, "hidden.layers"),
        ({"dtype": tensor_pb2.DATA_TYPE_INT32}, "hidden"),
        ({"dtype": tensor_pb2.DATA_TYPE_UNSPECIFIED}, "hidden"),
    ],
)
def test_what_the_target_does_not_have_is_refused(needs: dict, field: str) -> None:
    with pytest.raises(AttachRefused) as raised:
        make().open(info(**needs), 1)
    assert raised.value.field == field


def test_a_draft_that_reads_nothing_gets_nothing() -> None:
    assert make().open(draft_pb2.GetDraftInfoResponse(transports=[INLINE]), 1) is None


def test_one_refusal_is_taken_for_an_accident() -> None:
    arena = make()
    offered = []
    for epoch in range(1, 4):
        region = arena.open(info(), epoch)
        assert region is not None
        offered.append(region.transport)
        arena.ended(epoch, AttachRefused("arena.handle", "it is not the name of a segment"))
    assert offered == [SHM, SHM, INLINE]


def test_the_only_transport_is_offered_again_and_again() -> None:
    """No draft could attach without it, so a draft that was mended would never be attached."""
    arena = make(required="shm")
    for epoch in range(1, 5):
        region = arena.open(info(), epoch)
        assert region is not None
        assert region.transport == SHM
        arena.ended(epoch, AttachRefused("arena.handle", "cannot open the segment"))
    assert not segments()


def test_a_draft_that_cannot_map_gets_its_rows_in_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example is a draft in a container with its own /dev/shm."""

    def fails(arena: tensor_pb2.Arena) -> None:
        raise ArenaError("handle", "cannot open the segment: No such file or directory")

    monkeypatch.setattr(shared_memory, "_open", fails)
    path = make_checkpoint(tmp_path / "target")
    drafter = HiddenDrafter(48)
    with engine_with(drafter, path) as harness:
        eventually(lambda: harness.engine.load().draft_available)
        assert value("foredraft_draft_transport_info", transport="inline") == 1
        sampling = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
        result = harness.run([Job([5, 6, 7], sampling)])[0]
        drafter.texts = [[5, 6, 7, *result.tokens]]
    assert drafter.check(path) > 0
    assert not segments()


class OnGpu(HiddenWriter):
    """Stands for a region that another process may still be reading."""

    def __init__(self, epoch: int) -> None:
        super().__init__(RowFormat(64, torch.float32), 4)
        self.arena = tensor_pb2.Arena(transport=tensor_pb2.TRANSPORT_CUDA_IPC, epoch=epoch, size=1)
        self.is_freed = False

    def _put(self, first: int, rows: torch.Tensor) -> draft_pb2.HiddenRows:
        raise NotImplementedError

    def free(self) -> None:
        assert not self.is_freed
        self.is_freed = True


class GpuArena(Arena):
    """Makes such regions where no GPU is."""

    def __init__(self) -> None:
        super().__init__("unix:/tmp/draft.sock", 64, 4, 1 << 20, 100, "any")
        self.writers: list[OnGpu] = []

    def _open(self, transports: object, row: RowFormat, epoch: int, steps: object) -> HiddenWriter:
        self.writers.append(OnGpu(epoch))
        return self.writers[-1]


def of_process(pid: int) -> draft_pb2.GetDraftInfoResponse:
    found = info()
    found.process.CopyFrom(
        tensor_pb2.Process(pid=pid, start_time=start_time(pid) or 0, pid_namespace=pid_namespace())
    )
    return found


def test_a_region_on_a_gpu_stays_while_its_draft_may_read_it() -> None:
    first, second = (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)
    )
    try:
        arena = GpuArena()
        arena.open(of_process(first.pid), 1)
        arena.attached(1)
        first.send_signal(signal.SIGSTOP)
        arena.ended(1, DraftError("no answer within 1 s"))
        arena.open(of_process(second.pid), 2)
        arena.attached(2)
        assert not arena.writers[0].is_freed, "it only stands still"
        first.kill()
        first.wait()
        arena.ended(2, None)
        assert arena.writers[0].is_freed
        assert not arena.writers[1].is_freed, "its process lives"
        arena.open(of_process(second.pid), 3)
        assert not arena.writers[1].is_freed
        arena.attached(3)
        assert arena.writers[1].is_freed, "it serves one verifier: the attach before is over"
        arena.ended(3, AttachRefused("limits", "never so"))
        assert not arena.writers[2].is_freed, "it had taken it"
        arena.open(of_process(second.pid), 4)
        arena.ended(4, AttachRefused("limits", "no"))
        assert arena.writers[3].is_freed, "whoever refuses has unmapped it"
        arena.open(of_process(second.pid), 5)
        arena.ended(5, Overloaded("attached to 1 verifier"))
        assert arena.writers[4].is_freed, "it has not looked at it"
    finally:
        for process in (first, second):
            process.kill()
            process.wait()


def test_of_a_draft_that_cannot_be_seen_nothing_is_taken_for_granted() -> None:
    arena = GpuArena()
    for epoch in (1, 2):
        arena.open(info(), epoch)
        arena.attached(epoch)
        arena.ended(epoch, None)
    assert not any(writer.is_freed for writer in arena.writers)


def test_steps_that_stay_on_the_gpu_need_no_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Region] = []

    def open_region(
        transports: list, epoch: int, device: object, steps: StepSizes
    ) -> Region | None:
        if CUDA_IPC not in transports:
            return None
        assert steps == StepSizes(8, 4, 7)
        region = Region()
        region.arena = tensor_pb2.Arena(transport=CUDA_IPC, epoch=epoch, size=1)
        made.append(region)
        return region

    monkeypatch.setattr(choice, "open_region", open_region)
    arena = make(steps=StepSizes(8, 4, 7))
    arena._supported, arena._uuid = [CUDA_IPC, INLINE], "GPU-1"
    draft = draft_pb2.GetDraftInfoResponse(transports=[CUDA_IPC], device_uuid="GPU-1")
    assert arena.open(draft, 1) is None, "it has no such steps"
    draft.device_steps = True
    assert arena.open(draft, 2) == made[0].arena
    exchange = arena.exchange(2)
    assert exchange is not None
    assert (exchange.layers, exchange.writer, exchange.device) == (None, None, None)
    arena.attached(2)
    assert value("foredraft_draft_transport_info", transport="cuda_ipc") == 1
    arena.ended(2, None)
    for epoch in (3, 4):
        assert arena.open(draft, epoch) is not None
        arena.ended(epoch, AttachRefused("arena.handle", "cannot map the block"))
    assert arena.open(draft, 5) is None, "it can do without"
    arena.attached(5)
    arena.ended(5, None)
    assert arena.open(draft, 6) is not None, "it may have been mended"
    monkeypatch.setattr(cuda, "device_of", lambda uuid: torch.device("cuda", 1))
    # From a GPU of its own.
    for reaches in (False, True):
        monkeypatch.setattr(cuda, "reaches", lambda one, other: reaches)  # noqa: B023
        other = make(steps=StepSizes(8, 4, 7))
        other._supported, other._uuid = [CUDA_IPC, INLINE], "GPU-1"
        draft.device_uuid = "GPU-2"
        assert (other.open(draft, 5) is not None) == reaches
        assert not other.is_on_same_gpu(draft)
