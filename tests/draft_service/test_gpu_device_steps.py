"""A draft service on a GPU whose steps stay there: the trees of steps by value, and an end to every
wait.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.models.config import ModelConfig
from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.rpc.channel import channel
from foredraft.transport import choice
from foredraft.transport.base import HiddenWriter, Region
from foredraft.transport.device_exchange import DeviceExchange, StepSizes
from foredraft.transport.rows import RowFormat
from testing.device_drafts import Driver, Turn, fill, schedule
from testing.draft_cases import SAMPLINGS, limits_of
from testing.drafts import DraftProcess, DraftStream, attach_request, open_stream
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
GPU = torch.device("cuda", 0)
IPC = tensor_pb2.TRANSPORT_CUDA_IPC
MAX_BATCH, PAGE, VOCAB = 8, 4, 6000
regions: list[Region] = []


class Remote:
    """The verifier's end of an arena that a draft process has mapped."""

    def __init__(self, region: Region) -> None:
        assert region.device is not None
        self._region, self._device = region, region.device
        self.num_rows = MAX_BATCH

    def tell(self, message: draft_pb2.SequenceStep, hidden: torch.Tensor) -> None:
        assert isinstance(self._region, HiddenWriter)
        message.hidden.CopyFrom(self._region.write(hidden.to(GPU)))

    def put(self, row: int, tokens: list[int], hidden: torch.Tensor | None) -> None:
        fill(self._device.accepted[row], tokens)
        if self._device.rows is not None and hidden is not None:
            self._device.rows[row, : len(hidden)] = hidden.to(self._device.rows)

    def send(self, step: int, by_device: bool) -> None:
        if by_device:
            torch.cuda._sleep(3_000_000)  # the message is there long before
            self._device.publish(step)
        elif isinstance(self._region, HiddenWriter):
            self._region.sent(step)

    def read_trees(self, step: int) -> list[tuple[list[int], list[int]]]:
        self._device.wait_trees(step)
        trees: list[tuple[list[int], list[int]]] = self._device.trees.tolist()
        return trees


SERVICES = (
    ("EAGLE3",),
    ("EAGLE",),
    ("MTP", "--cuda-graph-max-bs", "2"),
    ("STANDALONE",),
    ("STANDALONE", "--disable-cuda-graph"),
    ("STANDALONE", "--speculative-draft-ahead"),
)


@pytest.fixture(scope="module")
def drafts() -> Iterator[dict[tuple[str, ...], DraftProcess]]:
    """All drafts, which load side by side, and the memory that they have mapped as long as they
    live.
    """
    with ExitStack() as stack:
        made = {}
        for algorithm, *flags in SERVICES:
            draft = DraftProcess(
                "--model-path", str(resolve_model_path("foredraft-demo")),
                "--speculative-algorithm", algorithm,
                "--speculative-draft-model-path", str(resolve_model_path(BUNDLED_DRAFTS[algorithm])),  # noqa: E501
                "--device", "cuda", "--dtype", "float32", *flags,
            )  # fmt: skip
            draft.start(ready=False)
            stack.callback(draft.__exit__, None, None, None)
            made[algorithm, *flags] = draft
        for draft in made.values():
            draft.wait_ready(120)
        yield made
    while regions:
        regions.pop().free()


@contextmanager
def attached(
    draft: DraftProcess, shape: tuple[int, int, int], ordering: str = "coupled", epoch: int = 1
) -> Iterator[tuple[DraftStream, Region, int]]:
    """A stream of steps, the verifier's memory, and the width of hidden states."""
    with channel(draft.target) as connection:
        stub = draft_pb2_grpc.DraftServiceStub(connection)
        info = stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest())
    assert info.device_steps
    assert IPC in info.transports
    sizes = StepSizes(MAX_BATCH, shape[0] + 1, shape[2] - 1)
    width, region = 0, None
    if info.HasField("hidden"):
        row = RowFormat.of(info.hidden)
        width, region = row.width, choice.open_writer([IPC], row, 400, epoch, GPU, sizes)
    else:
        region = choice.open_region([IPC], epoch, GPU, sizes)
    assert region is not None
    regions.append(region)
    target = ModelConfig.from_dir(resolve_model_path("foredraft-demo"))
    request = attach_request(
        epoch=epoch,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        target_fingerprint=target.fingerprint if width else "",
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        page_size=PAGE,
        num_pages=320,
        max_batch=MAX_BATCH,
        limits=limits_of(shape),
        draft_sampling=ordering,
        arena=region.arena,
    )
    try:
        with open_stream(draft.target, request) as stream:
            region.attached()
            yield stream, region, width
    finally:
        region.close()


def driver(stream: DraftStream, region: Region, width: int, shape: tuple[int, int, int]) -> Driver:
    def step(request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        message = draft_pb2.SpeculateRequest(step=request)
        if request.sequences and request.sequences[0].HasField("device_row"):
            stream.send(message)  # the trees are its answer
            return draft_pb2.StepResponse()
        response = stream.exchange(message).step
        if isinstance(region, HiddenWriter):
            region.answered(request.step)
        return response

    return Driver(step, Remote(region), width, PAGE, limits_of(shape), SAMPLINGS[:2])


@pytest.mark.parametrize(
    ("service", "shape"),
    list(
        zip(
            SERVICES,
            [(3, 1, 4), (3, 4, 12), (4, 2, 9), (3, 1, 4), (3, 3, 9), (3, 1, 4)],
            strict=True,
        )
    ),
    ids=lambda value: "-".join(map(str, value)),
)
def test_the_trees_of_steps_by_value(
    service: tuple[str, ...],
    shape: tuple[int, int, int],
    drafts: dict[tuple[str, ...], DraftProcess],
) -> None:
    # Drafts prepare for the outcomes of small batches alone.
    most = 3 if "--speculative-draft-ahead" in service else 6
    turns = schedule(7, 30, shape[0], VOCAB, 100, most)
    assert sum(turn.on_device for turn in turns) > 10
    found = []
    for by_device in (False, True):
        with attached(drafts[service], shape, epoch=1 + by_device) as (stream, region, width):
            made = driver(stream, region, width, shape)
            found.append(made.run(turns, lambda turn, allowed=by_device: allowed))  # type: ignore[misc]
    assert any(found[0])
    assert found[0] == found[1]


@contextmanager
def under_way(draft: DraftProcess) -> Iterator[tuple[DraftStream, Region, DeviceExchange, Driver]]:
    """A sequence that has begun."""
    shape = (3, 1, 4)
    with attached(draft, shape) as (stream, region, width):
        made = driver(stream, region, width, shape)
        made.take(Turn([(0, [5, 6, 7, 8], True)], [], False), False)
        assert region.device is not None
        yield stream, region, region.device, made


def send_only(stream: DraftStream, step: int) -> None:
    """A step on the device; nothing of it is committed yet."""
    request = draft_pb2.StepRequest(step=step)
    request.sequences.add(slot=0, device_row=0).propose.CopyFrom(limits_of((3, 1, 4)))
    stream.send(draft_pb2.SpeculateRequest(step=request))


def is_done_within(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not torch.cuda.current_stream().query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def test_a_draft_that_stands_still(drafts: dict[tuple[str, ...], DraftProcess]) -> None:
    draft = drafts[("EAGLE3",)]
    with under_way(draft) as (stream, _, exchange, _):
        draft.pause()
        send_only(stream, 2)
        fill(exchange.accepted[0], [9, 10])
        exchange.publish(2)
        exchange.wait_trees(2)
        assert not is_done_within(0.3)
        exchange.release(2)
        assert is_done_within(10)
        draft.resume()


@pytest.mark.parametrize("service", [SERVICES[0], SERVICES[3], SERVICES[5]], ids="-".join)
def test_a_verifier_that_leaves_in_the_middle(
    service: tuple[str, ...], drafts: dict[tuple[str, ...], DraftProcess]
) -> None:
    draft = drafts[service]
    with under_way(draft) as (stream, region, _, _):
        send_only(stream, 2)
        send_only(stream, 3)
        time.sleep(0.2)  # both are on the device by now, and wait
        stream.close()
        # The draft has let go of the verifier's memory when another one may attach.
        deadline = time.monotonic() + 15
        while refusal(draft) != grpc.StatusCode.FAILED_PRECONDITION:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        region.close()


def refusal(draft: DraftProcess) -> grpc.StatusCode:
    """Returns the status that a verifier of another target gets."""
    attach = draft_pb2.SpeculateRequest(attach=attach_request(epoch=2))
    with channel(draft.target) as connection:
        call = draft_pb2_grpc.DraftServiceStub(connection).Speculate(iter([attach]), timeout=20)
        with pytest.raises(grpc.RpcError) as raised:
            next(call)
    code: grpc.StatusCode = raised.value.code()
    return code
