"""Rows in GPU memory between two processes: the same bytes, in order, whoever dies, and no byte of
memory left behind.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.transport import choice, codec, cuda, weights
from foredraft.transport.process import Peer, own_identity
from foredraft.transport.rows import ArenaError, RowFormat
from testing.pipe_process import PipeProcess
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
GPU = torch.device("cuda", 0)
ROW = RowFormat(96, torch.float32)
IPC = tensor_pb2.TRANSPORT_CUDA_IPC


def serve(pipe: Any) -> None:
    """Reads what it is told to."""
    torch.zeros(1, device=GPU)
    pipe.send(own_identity().SerializeToString())
    reader: Any = None
    mapped: Any = None
    while True:
        what, *arguments = pipe.recv()
        try:
            answer: Any = None
            if what == "attach":
                arena, row, epoch = arguments
                reader = choice.open_reader(tensor_pb2.Arena.FromString(arena), row, epoch, GPU)
            elif what == "read":
                step, rows = arguments
                reader.expect(step)
                message = draft_pb2.HiddenRows.FromString(rows)
                answer = codec.raw(reader.read(message)).numpy().tobytes()
            elif what == "expect":
                reader.expect(*arguments)
                done = torch.cuda.Event()
                done.record()
                time.sleep(0.2)
                answer = done.query()
            elif what == "abandon":
                reader.abandon()
                torch.cuda.synchronize()
            elif what == "close":
                reader.close()
            elif what == "weights":
                arenas = [tensor_pb2.Arena.FromString(data) for data in arguments[0]]
                mapped = weights.MappedWeights(arenas)
                answer = {name: float(t.double().sum()) for name, t in mapped.tensors.items()}
                mapped.tensors["embedding"][0, 0] += 1
                torch.cuda.synchronize()
                mapped.close()
            elif what == "free":
                answer = torch.cuda.mem_get_info()[0]
            pipe.send(answer)
        except Exception as error:
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


@pytest.fixture(scope="module")
def draft() -> Iterator[PipeProcess]:
    made = PipeProcess(serve)
    yield made
    made.process.kill()


@contextlib.contextmanager
def attached(
    draft: PipeProcess, row: RowFormat = ROW, capacity: int = 16, epoch: int = 1
) -> Iterator[Any]:
    writer = choice.open_writer([IPC], row, capacity, epoch, GPU)
    draft.ask("attach", writer.arena.SerializeToString(), row, epoch)
    writer.attached()
    yield writer
    writer.close()
    if draft.process.is_alive():
        draft.ask("close")
    writer.free()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_arrive_as_they_were_written(draft: PipeProcess, dtype: torch.dtype) -> None:
    row = RowFormat(24, dtype)
    with attached(draft, row) as writer:
        for step in range(1, 40):
            sizes = [1 + (step * 7 + i * 5) % 5 for i in range(3)]
            parts = [torch.randn(size, 24, device=GPU) for size in sizes]
            messages = [writer.write(part) for part in parts]
            writer.sent(step)
            for part, message in zip(parts, messages, strict=True):
                data = draft.ask("read", step, message.SerializeToString())
                got = torch.frombuffer(bytearray(data), dtype=dtype).view(-1, 24)
                assert torch.equal(got, part.to(dtype).cpu())
            writer.answered(step)


def test_rows_on_the_host_go_too(draft: PipeProcess) -> None:
    with attached(draft) as writer:
        rows = torch.randn(3, 96)
        message = writer.write(rows)
        writer.sent(1)
        data = draft.ask("read", 1, message.SerializeToString())
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).view(3, 96), rows)


def test_a_message_that_is_faster_than_the_rows(draft: PipeProcess) -> None:
    slow = torch.randn(4096, 4096, device=GPU)
    with attached(draft) as writer:
        for step in range(1, 4):
            product = slow
            for _ in range(300):
                product = (product @ slow).clamp_(-1, 1)
            rows = product[:8, :96].contiguous()
            message = writer.write(rows)
            writer.sent(step)
            data = draft.ask("read", step, message.SerializeToString())
            got = torch.frombuffer(bytearray(data), dtype=torch.float32).view(8, 96)
            assert torch.equal(got, rows.cpu())
            writer.answered(step)


def test_a_wait_ends_when_it_is_abandoned(draft: PipeProcess) -> None:
    with attached(draft):
        assert draft.ask("expect", 1) is False
        draft.ask("abandon")


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_draft_that_goes_while_rows_are_on_their_way(ending: signal.Signals) -> None:
    draft = PipeProcess(serve)
    writer = choice.open_writer([IPC], ROW, 16, 1, GPU)
    draft.ask("attach", writer.arena.SerializeToString(), ROW, 1)
    writer.attached()
    peer = Peer(draft.identity)
    for step in range(1, 5):
        message = writer.write(torch.randn(4, 96, device=GPU))
        writer.sent(step)
        if step == 3:
            draft.tell("read", step, message.SerializeToString())
            draft.tell("expect", step + 1)  # and waits on the device
            os.kill(draft.process.pid, ending)
        writer.answered(step)
    torch.cuda.synchronize()
    if ending == signal.SIGSTOP:
        assert not peer.is_gone
        os.kill(draft.process.pid, signal.SIGKILL)
    draft.process.join(10)
    assert peer.is_gone
    writer.close()
    writer.free()
    assert float(torch.ones(5, device=GPU).sum()) == 5, "the device works"


def free_memory(draft: PipeProcess) -> int:
    """Bytes, once both processes are idle."""
    torch.cuda.synchronize()
    return int(draft.ask("free"))


def test_100_attaches_leave_nothing(draft: PipeProcess) -> None:
    row = RowFormat(4096, torch.float32)

    def cycle(epoch: int) -> None:
        with attached(draft, row, 1024, epoch) as writer:
            message = writer.write(torch.randn(4, 4096, device=GPU))
            writer.sent(1)
            draft.ask("read", 1, message.SerializeToString())

    epochs = itertools.count(1)
    lost = []
    for _ in range(4):
        before = free_memory(draft)
        for _ in range(25):
            cycle(next(epochs))
        lost.append(before - free_memory(draft))
    # What leaks does so in every round; other processes may use the GPU in some. The first round
    # sets up much.
    assert min(lost[1:]) <= 0, lost


def test_bad_descriptions_are_refused(draft: PipeProcess) -> None:
    writer = choice.open_writer([IPC], ROW, 16, 4, GPU)

    def refusal(epoch: int = 4, **changes: Any) -> str:
        arena = tensor_pb2.Arena()
        arena.CopyFrom(writer.arena)
        for name, value in changes.items():
            setattr(arena, name, value)
        with pytest.raises(RuntimeError) as raised:
            draft.ask("attach", arena.SerializeToString(), ROW, epoch)
        return str(raised.value)

    assert "epoch" in refusal(epoch=5)
    assert "handle" in refusal(handle=b"")
    assert "handle" in refusal(handle=bytes(64))
    assert "handle" in refusal(size=1 << 40)
    with pytest.raises(ArenaError, match="did not arrive"):
        writer.attached()  # nobody has answered
    writer.close()
    writer.free()


def test_weights_are_mapped_where_they_lie(draft: PipeProcess) -> None:
    embedding = torch.randn(4000, 1024, device=GPU)
    lm_head = torch.randn(4000, 1024, device=GPU, dtype=torch.bfloat16)
    both = {"embedding": embedding, "lm_head": lm_head}
    arenas = [arena.SerializeToString() for arena in weights.export(both, 1)]
    first = float(embedding[0, 0])
    sums = draft.ask("weights", arenas)
    assert sums["embedding"] == pytest.approx(float(embedding.double().sum()) - 1, abs=1e-6)
    assert sums["lm_head"] == pytest.approx(float(lm_head.double().sum()), abs=1e-6)
    assert float(embedding[0, 0]) == pytest.approx(first + 1)  # the other process wrote it


def test_which_transports_there_are() -> None:
    assert choice.supported(True, GPU)[0] == IPC
    assert IPC not in choice.supported(False, GPU)
    assert IPC not in choice.supported(True)
    assert cuda.device_of(cuda.uuid_of(GPU)) == GPU
    assert cuda.device_of("no such") is None
