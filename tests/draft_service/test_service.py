"""The service around a drafter that does as it is told: what goes on during a step, and how
sessions end.
"""

import asyncio
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE

import grpc
import pytest
import torch

from draft_service.drafters.base import Drafter, Proposer
from draft_service.service import SERVICE_NAME, DraftService
from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.errors import AttachRefused
from foredraft.rpc import channel as rpc_channel
from foredraft.rpc.channel import channel, check_health
from foredraft.rpc.protocol import DRAFT_PROTOCOL
from foredraft.rpc.server import RpcServer
from foredraft.telemetry import metrics
from testing.drafts import ROOT, DraftStream, attach_request, open_stream


class SlowDrafter(Drafter):
    """Steps, and attaches under epoch 7, last until they are let go; notes what it was asked."""

    max_sessions = 1

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.go = threading.Semaphore(0)

    def info(self) -> draft_pb2.GetDraftInfoResponse:
        return draft_pb2.GetDraftInfoResponse(algorithm="SLOW")

    def attach(self, request: draft_pb2.AttachRequest) -> tuple[Proposer, draft_pb2.AttachResponse]:
        self.events.put("attach")
        if request.epoch == 7:
            assert self.go.acquire(timeout=120)
        if request.epoch == 9:
            raise AttachRefused("epoch", "not 9")
        return SlowProposer(self), draft_pb2.AttachResponse(kv_bytes=5)

    def next_event(self) -> str:
        return self.events.get(timeout=120)


class SlowProposer(Proposer):
    def __init__(self, drafter: SlowDrafter) -> None:
        self._drafter = drafter

    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        self._drafter.events.put("step")
        assert self._drafter.go.acquire(timeout=120)
        if request.released_slots:
            raise RuntimeError("a bug")
        self._drafter.events.put("stepped")
        proposal = draft_pb2.Proposal(slot=0, tokens=[4, 5], parents=[-1, 0])
        return draft_pb2.StepResponse(proposals=[proposal], extend_microseconds=1000)

    def close(self) -> None:
        self._drafter.events.put("close")


@pytest.fixture
def slow() -> Iterator[tuple[SlowDrafter, str]]:
    """The drafter, served from a thread, and its address."""
    drafter = SlowDrafter()
    address: queue.SimpleQueue[str] = queue.SimpleQueue()
    end: list[Callable[[], None]] = []

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        end.append(lambda: loop.call_soon_threadsafe(stop.set))
        with ThreadPoolExecutor(1) as worker:
            server = RpcServer("127.0.0.1:0")
            service = DraftService(worker, on_lost=lambda: drafter.events.put("lost"))
            server.add(draft_pb2_grpc.add_DraftServiceServicer_to_server, service, SERVICE_NAME)
            bound = await server.start()
            with pytest.raises(grpc.RpcError, match="loading"):
                await asyncio.to_thread(DraftStream, bound.target, attach_request())
            service.open(drafter)
            await server.set_serving()
            address.put(bound.target)
            await stop.wait()
            await server.stop(0)
            await service.wait_closed(120)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    yield drafter, address.get(timeout=120)
    drafter.go.release(100)
    end[0]()
    thread.join()


def test_health_and_info_are_answered_during_a_step(slow: tuple[SlowDrafter, str]) -> None:
    drafter, target = slow
    with DraftStream(target, attach_request()) as stream:
        assert stream.attached.kv_bytes == 5
        stepping = threading.Thread(target=stream.step)
        stepping.start()
        assert [drafter.next_event(), drafter.next_event()] == ["attach", "step"]
        assert check_health(target) == "SERVING"
        with channel(target) as connection:
            stub = draft_pb2_grpc.DraftServiceStub(connection)
            assert stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest()).algorithm == "SLOW"
        with pytest.raises(grpc.RpcError) as caught:
            DraftStream(target, attach_request())
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        drafter.go.release()
        stepping.join()


def test_a_verifier_that_leaves_during_a_step(slow: tuple[SlowDrafter, str]) -> None:
    drafter, target = slow
    stream = DraftStream(target, attach_request())
    message = draft_pb2.SpeculateRequest(step=draft_pb2.StepRequest(step=1))
    stream.send(message)
    assert [drafter.next_event(), drafter.next_event()] == ["attach", "step"]
    stream.close()
    # Its place is taken until the step has ended and everything is freed.
    with pytest.raises(grpc.RpcError, match="serves no more"):
        DraftStream(target, attach_request())
    drafter.go.release()
    assert [drafter.next_event(), drafter.next_event()] == ["stepped", "close"]
    with open_stream(target, attach_request()):
        assert drafter.next_event() == "attach"
    assert drafter.next_event() == "close"


def test_a_verifier_that_leaves_during_the_attach(slow: tuple[SlowDrafter, str]) -> None:
    drafter, target = slow
    with channel(target) as connection:
        attach = draft_pb2.SpeculateRequest(attach=attach_request(epoch=7))
        call = draft_pb2_grpc.DraftServiceStub(connection).Speculate(iter([attach]))
        assert drafter.next_event() == "attach"
        call.cancel()
    drafter.go.release()
    assert drafter.next_event() == "close"
    with open_stream(target, attach_request()):
        assert drafter.next_event() == "attach"


def test_a_bug_ends_the_session_alone(slow: tuple[SlowDrafter, str]) -> None:
    drafter, target = slow
    drafter.go.release(2)
    with (
        DraftStream(target, attach_request()) as stream,
        pytest.raises(grpc.RpcError) as caught,
    ):
        stream.step(released=(1,))
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "a bug" not in caught.value.details()
    with open_stream(target, attach_request()) as stream:
        assert stream.step() == {0: ((4, 5), (-1, 0))}


def test_a_gpu_that_failed_is_found_out_when_a_session_ends(
    slow: tuple[SlowDrafter, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, target = slow
    drafter.device = torch.device("cpu")
    monkeypatch.setattr("draft_service.service.device_works", lambda device: False)
    with open_stream(target, attach_request()):
        pass
    assert drafter.next_event() == "attach"
    assert {drafter.next_event() for _ in range(2)} == {"close", "lost"}


def test_a_gpu_that_stands_still_is_given_up(
    slow: tuple[SlowDrafter, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, target = slow
    drafter.device = torch.device("cuda")
    monkeypatch.setattr("draft_service.service.device_works", lambda device: True)
    monkeypatch.setattr("draft_service.service.GPU_CLOSE_SECONDS", 0.1)
    with open_stream(target, attach_request()) as stream:
        stream.send(draft_pb2.SpeculateRequest(step=draft_pb2.StepRequest(step=1)))
        assert [drafter.next_event(), drafter.next_event()] == ["attach", "step"]
    assert drafter.next_event() == "lost"


def test_what_happens_is_counted(
    slow: tuple[SlowDrafter, str], caplog: pytest.LogCaptureFixture
) -> None:
    drafter, target = slow
    labels = {"algorithm": "SLOW"}
    names = ("steps_total", "extended_tokens_total", "proposed_tokens_total", "sessions")

    def figures() -> list[float]:
        return [metrics.value(f"foredraft_drafter_{name}", **labels) for name in names]

    def attaches(outcome: str) -> float:
        return metrics.value("foredraft_drafter_attaches_total", outcome=outcome, **labels)

    before, accepted, refused = figures(), attaches("accepted"), attaches("refused")
    drafter.go.release(2)
    for _ in range(2):
        with pytest.raises(grpc.RpcError, match="not 9"):
            DraftStream(target, attach_request(epoch=9))
    assert caplog.text.count("refused to attach") == 1
    with open_stream(target, attach_request()) as stream:
        for _ in range(2):
            stream.step(draft_pb2.SequenceStep(slot=0, tokens=[1, 2, 3]))
        assert [a - b for a, b in zip(figures(), before, strict=True)] == [2, 6, 4, 1]
    assert attaches("accepted") == accepted + 1
    assert attaches("refused") == refused + 2


def test_a_verifier_that_stands_still_loses_its_place(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(rpc_channel, "KEEPALIVE_SECONDS", 1)
    drafter, target = request.getfixturevalue("slow")
    program = (
        "import time; from testing.drafts import DraftStream, attach_request\n"
        f"stream = DraftStream({target!r}, attach_request())\n"
        "print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=PIPE) as verifier:
        assert verifier.stdout is not None
        verifier.stdout.readline()
        verifier.send_signal(signal.SIGSTOP)
        assert [drafter.next_event(), drafter.next_event()] == ["attach", "close"]
        verifier.kill()


def test_a_verifier_of_another_protocol_is_refused(slow: tuple[SlowDrafter, str]) -> None:
    drafter, target = slow
    for protocol in (0, DRAFT_PROTOCOL + 1):
        with pytest.raises(grpc.RpcError, match="protocol") as caught:
            DraftStream(target, attach_request(protocol=protocol))
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert drafter.events.empty()
    with open_stream(target, attach_request()):
        assert drafter.next_event() == "attach"


def test_a_stop_during_a_step_frees_the_session() -> None:
    drafter = SlowDrafter()

    async def main() -> None:
        with ThreadPoolExecutor(1) as worker:
            server, service = RpcServer("127.0.0.1:0"), DraftService(worker)
            server.add(draft_pb2_grpc.add_DraftServiceServicer_to_server, service, SERVICE_NAME)
            service.open(drafter)
            target = (await server.start()).target
            stream = await asyncio.to_thread(DraftStream, target, attach_request())
            stream.send(draft_pb2.SpeculateRequest(step=draft_pb2.StepRequest(step=1)))
            events = [await asyncio.to_thread(drafter.next_event) for _ in range(2)]
            assert events == ["attach", "step"]
            await server.stop(0)
            asyncio.get_running_loop().call_later(0.1, drafter.go.release)
            await service.wait_closed(120)
            stream.close()

    asyncio.run(main())
    assert [drafter.next_event(), drafter.next_event()] == ["stepped", "close"]
