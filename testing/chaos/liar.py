"""A lying draft: passes on a real draft's messages, and replaces some answers by nonsense of
many kinds.
"""

import random
from collections.abc import Callable
from pathlib import Path

import grpc

from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.rpc.channel import aio_channel

SHARE = 0.3  # share of answers that are lies
_UINT32 = 2**32 - 1
Lie = Callable[[draft_pb2.SpeculateResponse, draft_pb2.SpeculateRequest, random.Random], None]


def _unknown_tokens(response, request, rng) -> None:  # type: ignore[no-untyped-def]
    for proposal in response.step.proposals:
        proposal.tokens[:] = [rng.choice((_UINT32, 2**31, 10**6)) for _ in proposal.tokens]


def _wrong_tokens(response, request, rng) -> None:  # type: ignore[no-untyped-def]
    for proposal in response.step.proposals:
        proposal.tokens[:] = [rng.randrange(1000) for _ in proposal.tokens]


def _wild_parents(response, request, rng) -> None:  # type: ignore[no-untyped-def]
    for proposal in response.step.proposals:
        wild = (-(2**31), -7, len(proposal.tokens), 2**31 - 1, 0, 1)
        proposal.parents[:] = [rng.choice(wild) for _ in proposal.tokens]


def _lengths_differ(response, request, rng) -> None:  # type: ignore[no-untyped-def]
    for proposal in response.step.proposals:
        del proposal.parents[rng.randrange(len(proposal.parents) + 1) :]


def _endless_tree(response, request, rng) -> None:  # type: ignore[no-untyped-def]
    for proposal in response.step.proposals:
        proposal.tokens[:] = [rng.randrange(1000) for _ in range(20_000)]
        proposal.parents[:] = range(-1, 19_999)


def _strangers(response, request, rng) -> None:  # type: ignore[no-untyped-def]
    for slot in (0, 1, 47, 48, _UINT32):
        response.step.proposals.add(slot=slot, tokens=[5, 6], parents=[-1, 0])


def _swapped(response, request, rng) -> None:  # type: ignore[no-untyped-def]
    slots = [proposal.slot for proposal in response.step.proposals]
    rng.shuffle(slots)
    for proposal, slot in zip(response.step.proposals, slots, strict=True):
        proposal.slot = slot


def _many(response, request, rng) -> None:  # type: ignore[no-untyped-def]
    own = list(response.step.proposals)
    for _ in range(500):
        response.step.proposals.extend(own)


def _sure(response, request, rng) -> None:  # type: ignore[no-untyped-def]
    for proposal in response.step.proposals:
        proposal.confidence = rng.randint(0, _UINT32)
    response.step.extend_microseconds = response.step.draft_microseconds = _UINT32


def _wrong_step(response, request, rng) -> None:  # type: ignore[no-untyped-def]
    response.step.step += rng.choice((1, 1000))


def _attach_again(response, request, rng) -> None:  # type: ignore[no-untyped-def]
    response.attach.epoch = 1


def _nothing(response, request, rng) -> None:  # type: ignore[no-untyped-def]
    response.Clear()


# Lies after the first nine break the protocol, so that the verifier must end the stream.
LIES: tuple[Lie, ...] = (
    _unknown_tokens,
    _wrong_tokens,
    _wild_parents,
    _lengths_differ,
    _endless_tree,
    _strangers,
    _swapped,
    _many,
    _sure,
    _wrong_step,
    _attach_again,
    _nothing,
)
_ENDS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DATA_LOSS,
)


class Liar(draft_pb2_grpc.DraftServiceServicer):
    """Stands in front of a real draft.

    Args:
        listen: Path of its socket.
        upstream: Gives the path of the real draft's socket.
        rng: Chooses lies.
    """

    def __init__(self, listen: Path, upstream: Callable[[], Path], rng: random.Random) -> None:
        self.listen = listen
        self._upstream = upstream
        self._rng = rng
        self._server: grpc.aio.Server | None = None
        self._lies = LIES

    async def start(self) -> None:
        """Listens. Each start selects other lies."""
        self._lies = tuple(self._rng.sample(LIES, 4))
        self._server = grpc.aio.server()
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.listen}")
        await self._server.start()

    async def stop(self) -> None:
        """Ends all streams."""
        if self._server is not None:
            await self._server.stop(0)
        self.listen.unlink(missing_ok=True)

    async def GetDraftInfo(
        self, request: draft_pb2.GetDraftInfoRequest, context: grpc.aio.ServicerContext
    ) -> draft_pb2.GetDraftInfoResponse:
        async with aio_channel(f"unix:{self._upstream()}") as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            info: draft_pb2.GetDraftInfoResponse = await stub.GetDraftInfo(request, timeout=2)
        if self._rng.random() < SHARE:
            field = self._rng.choice(("vocab_size", "kv_bytes_per_token", "weight_bytes"))
            setattr(info, field, self._rng.choice((0, 7, 2**40)))
        return info

    async def Speculate(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        async with aio_channel(f"unix:{self._upstream()}") as channel:
            call = draft_pb2_grpc.DraftServiceStub(channel).Speculate()
            while (request := await context.read()) is not grpc.aio.EOF:
                await call.write(request)
                response = await call.read()
                if response is grpc.aio.EOF:
                    await context.abort(await call.code(), "the real draft ended the stream")
                if response.HasField("step") and self._rng.random() < SHARE:
                    if self._rng.random() < 0.02:
                        await context.abort(self._rng.choice(_ENDS), "a lie")
                    self._rng.choice(self._lies)(response, request, self._rng)
                await context.write(response)
