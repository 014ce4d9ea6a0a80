"""The draft's end of the arena: mapped with the session, refused by field, released with the
stream.
"""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.errors import AttachRefused
from foredraft.rpc.channel import channel
from foredraft.rpc.errors import from_rpc_error
from foredraft.transport.rows import RowFormat
from foredraft.transport.shared_memory import SharedMemoryWriter
from testing.drafts import DraftProcess, attach_request, open_stream
from testing.hidden_drafts import HiddenDraft, HiddenDrafter
from testing.segments import segments
from testing.stack import eventually

WIDTH = 32
ROW = RowFormat(WIDTH, torch.float32)


@pytest.fixture(scope="module")
def drafter() -> HiddenDrafter:
    return HiddenDrafter(WIDTH)


@pytest.fixture(scope="module")
def draft(drafter: HiddenDrafter) -> Iterator[HiddenDraft]:
    with HiddenDraft(drafter) as service:
        yield service


def maps() -> int:
    """Mapped segments of this process."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/foredraft-")


def step(rows: draft_pb2.HiddenRows) -> draft_pb2.SequenceStep:
    news = draft_pb2.SequenceStep(slot=0, position=0, tokens=[5, 6, 7], new_pages=[1], hidden=rows)
    news.begin.SetInParent()
    news.propose.num_steps = 2
    news.propose.num_draft_tokens = 4
    return news


def test_rows_come_through_the_arena(draft: HiddenDraft, drafter: HiddenDrafter) -> None:
    writer = SharedMemoryWriter(ROW, 8, epoch=1)
    rows = torch.randn(2, WIDTH)
    with open_stream(draft.target, attach_request(arena=writer.arena)) as stream:
        writer.attached()
        stream.step(step(writer.write(rows)))
        view = drafter.views[-1]
        assert [entry[1] for entry in view.entries] == [6, 7]
        assert torch.equal(torch.stack([entry[0] for entry in view.entries]), rows)
    writer.close()


def test_a_thousand_attaches_leave_nothing(draft: HiddenDraft) -> None:
    def cycle(epoch: int) -> None:
        writer = SharedMemoryWriter(ROW, 8, epoch)
        with open_stream(draft.target, attach_request(arena=writer.arena, epoch=epoch)) as stream:
            writer.attached()
            stream.step(step(writer.write(torch.randn(2, WIDTH))))
        writer.close()

    for epoch in range(1, 20):
        cycle(epoch)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for epoch in range(20, 1000):
        cycle(epoch)
    assert not segments()
    # The last session may still be ending: draft and verifier are both in this process.
    eventually(lambda: maps() <= 1)
    eventually(lambda: abs(len(os.listdir("/proc/self/fd")) - descriptors) < 10)
    eventually(lambda: threading.active_count() <= threads + 2)


def refused(target: str, attach: draft_pb2.AttachRequest) -> str:
    """The field for which a draft refuses."""
    with pytest.raises(grpc.RpcError) as raised:
        open_stream(target, attach)
    error = from_rpc_error(raised.value)
    assert isinstance(error, AttachRefused)
    return error.field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda arena: arena.ClearField("handle"), "arena.handle"),
        (lambda arena: setattr(arena, "size", 1 << 40), "arena.size"),
        (lambda arena: setattr(arena, "epoch", 9), "arena.epoch"),
        (lambda arena: setattr(arena, "transport", 3), "arena.transport"),
        (lambda arena: arena.tensors[0].shape.__setitem__(1, 31), "arena.tensors"),
    ],
)
def test_a_bad_arena_is_refused(
    draft: HiddenDraft, change: Callable[[tensor_pb2.Arena], object], field: str
) -> None:
    writer = SharedMemoryWriter(ROW, 8, epoch=1)
    arena = tensor_pb2.Arena()
    arena.CopyFrom(writer.arena)
    change(arena)
    assert refused(draft.target, attach_request(arena=arena)) == field
    writer.close()


def test_no_arena_is_refused(draft: HiddenDraft) -> None:
    assert refused(draft.target, attach_request()) == "arena"


@pytest.mark.parametrize(
    "rows",
    [
        draft_pb2.HiddenRows(arena_row=8, num_rows=2),
        draft_pb2.HiddenRows(arena_row=0, num_rows=9),
        draft_pb2.HiddenRows(inline=tensor_pb2.Tensor(), num_rows=2),
    ],
)
def test_rows_that_do_not_exist_end_the_stream(
    draft: HiddenDraft, rows: draft_pb2.HiddenRows
) -> None:
    writer = SharedMemoryWriter(ROW, 8, epoch=1)
    with (
        open_stream(draft.target, attach_request(arena=writer.arena)) as stream,
        pytest.raises(grpc.RpcError) as raised,
    ):
        stream.step(step(rows))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    writer.close()


def test_transports_are_those_that_a_drafter_can_use(draft: HiddenDraft) -> None:
    with channel(draft.target) as connection:
        stub = draft_pb2_grpc.DraftServiceStub(connection)
        info = stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), timeout=60)
    assert list(info.transports) == [tensor_pb2.TRANSPORT_SHM, tensor_pb2.TRANSPORT_INLINE]


def test_an_ngram_draft_never_loads_torch() -> None:
    with DraftProcess() as process:
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
