"""Steps between two processes on one GPU: what was committed and trees arrive in order, and no wait
is for ever.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.transport import choice
from foredraft.transport.base import Region
from foredraft.transport.device_exchange import DeviceExchange, StepSizes
from foredraft.transport.process import own_identity
from foredraft.transport.rows import ArenaError, RowFormat
from testing.pipe_process import PipeProcess
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
GPU = torch.device("cuda", 0)
ROW = RowFormat(24, torch.bfloat16)
IPC = tensor_pb2.TRANSPORT_CUDA_IPC
SIZES = StepSizes(max_batch=5, num_tokens=4, num_nodes=7)


def serve(pipe: Any) -> None:
    """A draft whose trees are made of what was committed: tokens one higher, and the sum of the
    hidden states.
    """
    torch.zeros(1, device=GPU)
    pipe.send(own_identity().SerializeToString())
    end: Any = None
    exchange: Any = None
    while True:
        what, *arguments = pipe.recv()
        try:
            if what == "attach":
                message, row = arguments
                arena = tensor_pb2.Arena.FromString(message)
                if row is None:
                    end = exchange = choice.open_exchange(arena, 1, GPU)
                else:
                    end = choice.open_reader(arena, row, 1, GPU)
                    exchange = end.exchange
                # Kernels are loaded when they first run, which waits for the device.
                draft(exchange)
                exchange.trees.zero_()
                torch.cuda.synchronize()
            elif what == "step":
                exchange.wait(arguments[0])
                draft(exchange)
                exchange.publish(arguments[0])
            elif what == "sync":
                torch.cuda.synchronize()
            elif what == "abandon":
                exchange.abandon()
            elif what == "close":
                end.close()
            pipe.send(None)
        except Exception as error:
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def draft(exchange: Any) -> None:
    """Enqueues one step."""
    trees = exchange.trees
    trees[:, 0, :5] = exchange.accepted + 1
    if exchange.hidden is not None:
        rows = exchange.hidden[exchange.first_row :].view(SIZES.max_batch, -1)
        trees[:-1, 1, 0] = rows.float().sum(1).int()


@pytest.fixture
def draft_process() -> Iterator[PipeProcess]:
    made = PipeProcess(serve)
    yield made
    made.process.kill()


@contextlib.contextmanager
def attached(
    draft: PipeProcess, row: RowFormat | None = ROW
) -> Iterator[tuple[Region, DeviceExchange]]:
    if row is None:
        made = choice.open_region([IPC], 1, GPU, SIZES)
        assert made is not None
        region: Region = made
    else:
        region = choice.open_writer([IPC], row, 16, 1, GPU, SIZES)
    draft.ask("attach", region.arena.SerializeToString(), row)
    region.attached()
    assert region.device is not None
    yield region, region.device
    region.close()
    if not draft.peer.is_gone:
        draft.ask("close")
    region.free()


def work() -> None:
    """Keeps the current stream busy for some tens of milliseconds."""
    torch.cuda._sleep(50_000_000)


def ends(stream: torch.cuda.Stream, seconds: float) -> bool:
    """Whether a stream comes to its end in time."""
    deadline = time.monotonic() + seconds
    while not stream.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


@pytest.mark.parametrize("row", [ROW, None], ids=["rows", "no-rows"])
@pytest.mark.parametrize("slow", [False, True])
def test_steps_come_and_go_in_order(
    draft_process: PipeProcess, row: RowFormat | None, slow: bool
) -> None:
    with attached(draft_process, row) as (_, exchange):
        assert exchange.accepted.shape == (5, 5)
        assert exchange.trees.shape == (5, 2, 7)
        assert (exchange.rows is None) == (row is None)
        seen = []
        for step in range(1, 40):
            draft_process.tell("step", step)  # always before the rows are there
            if slow:
                work()
            exchange.accepted.fill_(step)
            if exchange.rows is not None:
                exchange.rows.fill_(step % 4)
            exchange.publish(step)
            exchange.wait_trees(step)
            seen.append(exchange.trees.clone())
        for step, trees in enumerate(seen, 1):
            draft_process.hear()
            assert trees[:, 0, :5].eq(step + 1).all(), step
            if row is not None:
                assert trees[:, 1, 0].eq(step % 4 * 4 * 24).all(), step


@pytest.mark.parametrize("way", ["release", "close"])
def test_a_wait_for_a_draft_that_stands_still_ends(way: str) -> None:
    draft = PipeProcess(serve)
    with attached(draft) as (region, exchange):
        os.kill(draft.process.pid, signal.SIGSTOP)
        waiting, other = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(waiting):
            exchange.publish(1)
            exchange.wait_trees(1)
            trees = exchange.trees.clone()
        with torch.cuda.stream(other):
            work()
        assert ends(other, 10), "a wait holds up its own stream alone"
        assert not ends(waiting, 0.2)
        if way == "close":
            thread = threading.Thread(target=region.close)
        else:
            thread = threading.Thread(target=exchange.release, args=(1,))
        thread.start()
        assert ends(waiting, 10)
        thread.join(10)
        assert trees.eq(0).all()
        region.close()
        with torch.cuda.stream(waiting):
            exchange.wait_trees(2)
        assert ends(waiting, 10), "after the end nothing is waited for"
        assert not draft.peer.is_gone
        os.kill(draft.process.pid, signal.SIGKILL)
        draft.process.join(10)
        del trees, thread
    assert float(torch.ones(5, device=GPU).sum()) == 5, "the device works"


def test_a_draft_killed_with_a_step_under_way() -> None:
    draft = PipeProcess(serve)
    with attached(draft) as (region, exchange):
        draft.ask("step", 1)  # and waits on the device
        exchange.accepted.fill_(3)
        os.kill(draft.process.pid, signal.SIGKILL)
        draft.process.join(10)
        exchange.publish(1)
        exchange.wait_trees(1)
        region.close()
        assert ends(torch.cuda.current_stream(), 10)
        assert draft.peer.is_gone


def test_a_draft_does_not_wait_for_a_verifier_that_is_gone(draft_process: PipeProcess) -> None:
    with attached(draft_process):
        draft_process.ask("step", 1)
        draft_process.ask("step", 2)
        draft_process.ask("abandon")
        draft_process.ask("sync")


def test_memory_stays_while_somebody_holds_it(draft_process: PipeProcess) -> None:
    with attached(draft_process) as (region, exchange):
        held = exchange.trees
        region.close()
        draft_process.ask("close")
        region.free()
        held.fill_(7)
        torch.cuda.synchronize()
        assert held.eq(7).all()
        region.free = lambda: None  # type: ignore[method-assign]


def test_descriptions_that_lie(draft_process: PipeProcess) -> None:
    with attached(draft_process) as (region, _):

        def refusal(change: Any) -> str:
            arena = tensor_pb2.Arena()
            arena.CopyFrom(region.arena)
            change({tensor.name: tensor for tensor in arena.tensors})
            with pytest.raises(RuntimeError) as raised:
                draft_process.ask("attach", arena.SerializeToString(), ROW)
            return str(raised.value)

        def move(tensors: Any) -> None:
            tensors["rows"].offset += 2 * ROW.num_bytes

        def grow(tensors: Any) -> None:
            tensors["trees"].shape[0] = 1 << 40

        def rename(tensors: Any) -> None:
            tensors["accepted"].name = "else"

        assert "do not lie" in refusal(move)
        assert "does not lie" in refusal(grow)
        assert "none named" in refusal(rename)
        draft_process.ask("attach", region.arena.SerializeToString(), ROW)


def test_without_a_gpu_in_common_there_is_none() -> None:
    assert choice.open_region([tensor_pb2.TRANSPORT_INLINE], 1, GPU, SIZES) is None
    with pytest.raises(ArenaError, match="transport"):
        choice.open_exchange(tensor_pb2.Arena(), 1, GPU)
