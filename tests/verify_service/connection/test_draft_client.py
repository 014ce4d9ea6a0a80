"""The verifier's connection to a draft: attached, lost in every way, and attached again."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.rpc import status_pb2

from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.errors import DraftError
from foredraft.rpc.errors import DETAILS_KEY
from testing.drafts import DraftProcess, attach_request
from testing.stack import eventually
from verify_service.connection import client as draft_client
from verify_service.connection.client import DraftClient

COPY = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft on a busy machine is no draft that is not reachable."""
    monkeypatch.setattr(draft_client, "INFO_TIMEOUT", 60.0)


@pytest.fixture(scope="module")
def draft() -> Iterator[DraftProcess]:
    with DraftProcess() as process:
        yield process


class Client:
    """A client of a tiny verifier, with what it said of its state."""

    def __init__(self, target: str, step_timeout: float = 60.0, **attach: Any) -> None:
        self.states: list[str] = []
        self.client = DraftClient(
            target,
            lambda info, epoch: attach_request(epoch=epoch, **attach),
            step_timeout,
            self.states.append,
        )
        self.client.start()
        self.client.allow_attach()
        self._num_steps = 0

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def attached(self) -> int:
        eventually(lambda: self.client.epoch > 0)
        self._num_steps = 0
        return self.client.epoch

    def request(self) -> draft_pb2.StepRequest:
        """A sequence that repeats itself."""
        self._num_steps += 1
        request = draft_pb2.StepRequest(step=self._num_steps)
        sequence = request.sequences.add(slot=0, tokens=COPY)
        sequence.begin.SetInParent()
        sequence.propose.num_draft_tokens = 4
        return request

    def step(self) -> list[int]:
        self.client.send(self.request())
        return list(self.client.receive().proposals[0].tokens)


def usage() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_steps_are_answered(draft: DraftProcess) -> None:
    with Client(draft.target) as verifier:
        info = verifier.client.wait(60)
        assert info is not None
        assert info.algorithm == "NGRAM"
        assert verifier.attached() == 1
        assert [verifier.step() for _ in range(3)] == [[8, 9, 10]] * 3
    assert verifier.states == ["attached"]
    assert verifier.client.epoch == 0


def test_a_step_for_another_attach_is_not_sent(draft: DraftProcess) -> None:
    with Client(draft.target) as verifier:
        first = verifier.attached()
        for other in (0, first + 1):
            with pytest.raises(DraftError, match="no draft is attached"):
                verifier.client.send(draft_pb2.StepRequest(step=1), epoch=other)
        verifier.client.send(verifier.request(), epoch=first)
        assert verifier.client.receive().step == 1
        verifier.client.drop("for the test")
        assert verifier.attached() == first + 1
        with pytest.raises(DraftError, match="no draft is attached"):
            verifier.client.send(draft_pb2.StepRequest(step=1), epoch=first)
        assert verifier.step() == [8, 9, 10]


def test_answers_may_be_read_later(draft: DraftProcess) -> None:
    with Client(draft.target) as verifier:
        verifier.attached()
        for _ in range(20):
            verifier.client.send(verifier.request())
        assert [verifier.client.receive().step for _ in range(20)] == list(range(1, 21))


def test_answers_are_looked_for_without_waiting(nonsense: Any) -> None:
    """Answers that have come and others that have not are told apart by both ways of reading."""
    gates = [threading.Event() for _ in range(6)]

    def answer(request: draft_pb2.SpeculateRequest) -> draft_pb2.SpeculateResponse:
        if request.HasField("attach"):
            return draft_pb2.SpeculateResponse(
                attach=draft_pb2.AttachResponse(epoch=request.attach.epoch)
            )
        assert gates[request.step.step - 1].wait(120)
        return draft_pb2.SpeculateResponse(step=draft_pb2.StepResponse(step=request.step.step))

    with Client(nonsense(answer), step_timeout=120) as verifier:
        verifier.attached()
        client = verifier.client
        with pytest.raises(DraftError, match="no step"):
            client.has_answer()
        for _ in gates:
            client.send(verifier.request())
        assert not client.has_answer()
        assert not client.has_answer(0.01)
        gates[0].set()
        eventually(client.has_answer)
        assert client.receive().step == 1
        gates[1].set()
        assert client.receive().step == 2
        assert not client.has_answer()
        gates[2].set()
        assert client.receive().step == 3  # while another thread reads it
        for gate in gates:
            gate.set()
        assert client.receive().step == 4
        assert client.has_answer(10)
        assert client.has_answer()
        assert [client.receive().step for _ in range(2)] == [5, 6]


def test_nothing_is_attached_before_it_is_allowed(draft: DraftProcess) -> None:
    client = DraftClient(draft.target, lambda info, epoch: attach_request(epoch=epoch), 1.0)
    client.start()
    assert client.wait(60) is not None
    assert client.epoch == 0
    with pytest.raises(DraftError, match="no draft"):
        client.send(draft_pb2.StepRequest(step=1))
    client.allow_attach()
    eventually(lambda: client.epoch == 1)
    client.close()


def test_waiting_for_a_draft_that_is_not_there_ends(tmp_path: Path) -> None:
    with Client(f"unix:{tmp_path}/no.sock") as verifier:
        assert verifier.client.wait(0.2) is None
        eventually(lambda: bool(verifier.states))
        assert verifier.states[0].startswith("not reachable")


def test_close_does_not_wait_for_anything(draft: DraftProcess) -> None:
    client = DraftClient(draft.target, lambda info, epoch: attach_request(epoch=epoch), 1.0)
    client.close()
    client = DraftClient(draft.target, lambda info, epoch: attach_request(epoch=epoch), 1.0)
    client.start()
    client.close()


def test_a_step_of_an_older_attach_is_not_sent(draft: DraftProcess) -> None:
    with Client(draft.target) as verifier:
        verifier.attached()
        with pytest.raises(DraftError, match="step 7 does not follow step 0"):
            verifier.client.send(draft_pb2.StepRequest(step=7))
        with pytest.raises(DraftError, match="no step"):
            verifier.client.receive()
        assert verifier.step() == [8, 9, 10]


def test_a_killed_draft_is_noticed_and_comes_back() -> None:
    with DraftProcess() as process, Client(process.target) as verifier:
        for epoch in (1, 2, 3):
            assert verifier.attached() == epoch
            assert verifier.step() == [8, 9, 10]
            process.kill()
            # Without a step as well: health has to know.
            eventually(lambda: verifier.client.epoch == 0)
            process.start(ready=False)
        assert verifier.attached() == 4
    assert [state for state in verifier.states if state == "attached"] == ["attached"] * 4


def test_a_draft_killed_while_it_is_waited_for(draft: DraftProcess) -> None:
    with DraftProcess() as process, Client(process.target) as verifier:
        verifier.attached()
        process.pause()
        verifier.client.send(verifier.request())
        threading.Timer(0.1, process.kill).start()
        with pytest.raises(DraftError):
            verifier.client.receive()
        assert verifier.client.epoch == 0


def test_a_stopped_draft_times_out_and_goes_on_later() -> None:
    with DraftProcess() as process, Client(process.target) as verifier:
        verifier.attached()
        assert verifier.step() == [8, 9, 10]
        process.pause()
        verifier.client.step_timeout = 0.2
        verifier.client.send(verifier.request())
        with pytest.raises(DraftError, match=r"no answer within 0\.2 s"):
            verifier.client.receive()
        assert verifier.client.epoch == 0
        with pytest.raises(DraftError):
            verifier.client.receive()
        verifier.client.step_timeout = 60.0
        process.resume()
        assert verifier.attached() >= 2
        assert verifier.step() == [8, 9, 10]


def test_a_stopped_draft_is_dropped_while_nobody_waits() -> None:
    with DraftProcess() as process, Client(process.target, step_timeout=1.0) as verifier:
        epoch = verifier.attached()
        process.pause()
        verifier.client.send(verifier.request())
        assert not verifier.client.has_answer()
        eventually(lambda: verifier.client.epoch == 0)
        for use in (verifier.client.has_answer, verifier.client.receive):
            with pytest.raises(DraftError):
                use()
        eventually(lambda: "lost: no answer in time" in verifier.states)
        assert verifier.client.late_epoch == epoch
        verifier.client.step_timeout = 60.0
        process.resume()
        assert verifier.attached() >= 2
        assert verifier.step() == [8, 9, 10]


def test_a_draft_killed_while_its_answer_is_looked_for() -> None:
    with DraftProcess() as process, Client(process.target, step_timeout=120) as verifier:
        verifier.attached()
        process.pause()
        verifier.client.send(verifier.request())
        assert not verifier.client.has_answer()
        process.kill()
        eventually(lambda: verifier.client.epoch == 0)
        process.start(ready=False)
        verifier.attached()
        verifier.client.send(verifier.request())
        eventually(verifier.client.has_answer)
        assert verifier.client.receive().step == 1


def test_closing_ends_a_look() -> None:
    with DraftProcess() as process:
        with Client(process.target, step_timeout=600) as verifier:
            verifier.attached()
            process.pause()
            verifier.client.send(verifier.request())
            assert not verifier.client.has_answer()
        assert not [one for one in threading.enumerate() if one.name == "draft-reader"]


def test_many_tokens_are_given_more_time() -> None:
    with (
        DraftProcess() as process,
        Client(process.target, step_timeout=0.1, max_context=5000) as verifier,
    ):
        verifier.attached()
        process.pause()
        request = verifier.request()
        request.sequences[0].tokens.extend(COPY * 60)
        verifier.client.send(request)
        with pytest.raises(DraftError, match=r"no answer within 0\.3 s"):
            verifier.client.receive()


def test_a_refused_step_costs_the_attach_only(draft: DraftProcess) -> None:
    with Client(draft.target) as verifier:
        verifier.attached()
        request = verifier.request()
        request.sequences[0].tokens.append(128)
        verifier.client.send(request)
        with pytest.raises(DraftError, match="not in the vocabulary"):
            verifier.client.receive()
        assert verifier.attached() == 2
        assert verifier.step() == [8, 9, 10]


def test_a_refused_attach_is_said_once_and_tried_again(draft: DraftProcess) -> None:
    with Client(draft.target, max_batch=0) as verifier:
        assert verifier.client.wait(60) is not None
        eventually(lambda: verifier.client._last_epoch >= 3)
        assert len(verifier.states) == 1
        assert verifier.states[0].startswith("not attached: max_batch")


class Nonsense(draft_pb2_grpc.DraftServiceServicer):
    """Attaches properly the first time round and answers steps as it is told."""

    def __init__(self, answer: Callable[[draft_pb2.SpeculateRequest], Any]) -> None:
        self._answer = answer

    def GetDraftInfo(self, request: Any, context: Any) -> Any:
        return draft_pb2.GetDraftInfoResponse(algorithm="NONSENSE")

    def Speculate(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            answer = self._answer(request)
            if answer is None:
                return
            if isinstance(answer, grpc.Status):
                context.abort_with_status(answer)
            yield answer


def good_attach(request: draft_pb2.SpeculateRequest) -> draft_pb2.SpeculateResponse | None:
    if not request.HasField("attach"):
        return None
    attach = draft_pb2.AttachResponse(epoch=request.attach.epoch)
    return draft_pb2.SpeculateResponse(attach=attach)


@pytest.fixture
def nonsense() -> Iterator[Callable[[Callable[[draft_pb2.SpeculateRequest], Any]], str]]:
    servers: list[grpc.Server] = []

    def start(answer: Callable[[draft_pb2.SpeculateRequest], Any]) -> str:
        server = grpc.server(ThreadPoolExecutor(4))
        handlers = {
            "GetDraftInfo": grpc.unary_unary_rpc_method_handler(
                Nonsense(answer).GetDraftInfo,
                draft_pb2.GetDraftInfoRequest.FromString,
                draft_pb2.GetDraftInfoResponse.SerializeToString,
            ),
            "Speculate": grpc.stream_stream_rpc_method_handler(
                Nonsense(answer).Speculate,
                draft_pb2.SpeculateRequest.FromString,
                lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            ),
        }
        name = "foredraft.api.draft.v1.DraftService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(0).wait()


class Status(NamedTuple):
    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


grpc.Status.register(Status)


def broken_details() -> Status:
    """Returns a status with a detail that says it is one of ours, and is no message."""
    status = status_pb2.Status()
    status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")
    metadata = ((DETAILS_KEY, status.SerializeToString()),)
    return Status(grpc.StatusCode.UNAVAILABLE, "broken", metadata)


@pytest.mark.parametrize(
    "answer",
    [
        draft_pb2.SpeculateResponse(step=draft_pb2.StepResponse(step=2)),
        draft_pb2.SpeculateResponse(),
        draft_pb2.SpeculateResponse(attach=draft_pb2.AttachResponse(epoch=1)),
        b"\xff\xff\xff nonsense",
        broken_details(),
        None,
    ],
    ids=["wrong step", "empty", "attach", "no message", "broken details", "end"],
)
def test_a_nonsensical_answer_drops_the_draft(nonsense: Any, answer: Any) -> None:
    with Client(nonsense(lambda request: good_attach(request) or answer)) as verifier:
        verifier.attached()
        verifier.client.send(verifier.request())
        with pytest.raises(DraftError):
            verifier.client.receive()
        assert verifier.attached() > 1


@pytest.mark.parametrize(
    "answer",
    [
        draft_pb2.SpeculateResponse(attach=draft_pb2.AttachResponse(epoch=99)),
        draft_pb2.SpeculateResponse(step=draft_pb2.StepResponse(step=1)),
        b"\xff nonsense",
        None,
    ],
    ids=["wrong epoch", "step", "no message", "end"],
)
def test_a_nonsensical_attach_is_no_attach(nonsense: Any, answer: Any) -> None:
    with Client(nonsense(lambda request: answer)) as verifier:
        eventually(lambda: verifier.client._last_epoch >= 2)
        assert verifier.client.epoch == 0


def test_a_listener_that_never_speaks_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_client, "INFO_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        with Client(target) as verifier:
            eventually(lambda: bool(verifier.states))
            assert verifier.states[0].startswith("not reachable")


def test_cycles_leave_no_thread_and_no_descriptor(
    draft: DraftProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_client, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(draft_client, "LONGEST_BACKOFF", 0.001)
    with Client(draft.target) as verifier:

        def cycle(times: int) -> None:
            for i in range(times):
                epoch = verifier.attached()
                request = verifier.request()
                request.sequences[0].tokens.append(128)
                verifier.client.send(request)
                if i % 3 < 2:  # whose answer nobody takes, or only if it has come
                    with contextlib.suppress(DraftError):  # the draft may have refused it already
                        if verifier.client.has_answer() and i % 3:
                            verifier.client.receive()
                    eventually(lambda epoch=epoch: verifier.client.epoch != epoch)
                    continue
                with pytest.raises(DraftError):
                    verifier.client.receive()
                eventually(lambda epoch=epoch: verifier.client.epoch > epoch)

        cycle(10)
        (descriptors, threads), num_draft = usage(), draft.num_descriptors()
        cycle(100)
        # gRPC ends a stream's threads and sockets a moment after the stream.
        eventually(lambda: usage()[0] <= descriptors + 2 and usage()[1] <= threads + 2)
        eventually(lambda: draft.num_descriptors() <= num_draft + 2)


def test_clients_leave_no_thread_and_no_descriptor(draft: DraftProcess) -> None:
    def use(times: int) -> None:
        for _ in range(times):
            with Client(draft.target) as verifier:
                verifier.attached()
                verifier.step()
                verifier.client.send(verifier.request())
                verifier.client.has_answer()

    use(5)
    descriptors, threads = usage()
    use(40)
    eventually(lambda: usage()[0] <= descriptors + 2 and usage()[1] <= threads)
