"""The DraftService over gRPC: attaches verifiers and passes their steps to sessions.

How to draft is the drafters'.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from draft_service.drafters.base import Drafter
from draft_service.hidden import device_works, open_arena, supported_transports
from draft_service.metrics import DrafterMetrics
from draft_service.session import Session
from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.errors import AttachRefused, InvalidRequest, Overloaded, Unavailable
from foredraft.rpc.protocol import DRAFT_PROTOCOL
from foredraft.rpc.server import wait_briefly
from foredraft.transport.process import own_identity

SERVICE_NAME = "foredraft.api.draft.v1.DraftService"
# A step on a GPU ends within STEP_SECONDS of its drafter, even one that waits for a verifier that
# has died.
GPU_CLOSE_SECONDS = 30.0

logger = logging.getLogger(__name__)


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Serves one drafter to verifiers.

    Args:
        worker: The thread in which the drafter runs; it has one, so that forwards never overlap.
        on_lost: Called when the drafter's GPU has failed this process for good; nothing but another
            process can use it. The worker may never end then.
    """

    def __init__(
        self, worker: ThreadPoolExecutor, on_lost: Callable[[], None] = lambda: None
    ) -> None:
        self._worker = worker
        self._on_lost = on_lost
        self._drafter: Drafter | None = None
        self._is_open = asyncio.Event()
        self._info = draft_pb2.GetDraftInfoResponse()
        self._refusal = ""
        self._num_sessions = 0
        self._no_session = asyncio.Event()
        self._no_session.set()

    def open(self, drafter: Drafter) -> None:
        """Lets verifiers attach from now on."""
        self._drafter = drafter
        self._info = drafter.info()
        del self._info.transports[:]
        self._info.transports.extend(supported_transports(self._info, drafter.device))
        self._info.process.CopyFrom(own_identity())
        self._info.protocol = DRAFT_PROTOCOL
        self._metrics = DrafterMetrics(self._info.algorithm)
        self._is_open.set()

    async def wait_closed(self, timeout: float) -> None:
        """Waits until all sessions have ended and freed their memory, for at most `timeout`
        seconds.

        The worker must live until then: a step may be under way in it when the server stops.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._no_session.wait()

    async def GetDraftInfo(
        self, request: draft_pb2.GetDraftInfoRequest, context: grpc.aio.ServicerContext
    ) -> draft_pb2.GetDraftInfoResponse:
        """Returns the draft's properties and needs."""
        await wait_briefly(self._is_open)
        self._loaded()
        return self._info

    async def GetFusion(
        self, request: draft_pb2.GetFusionRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[draft_pb2.GetFusionResponse]:
        """Streams the weights with which a verifier projects hidden states in the draft's place."""
        for part in self._loaded().fusion_parts():
            yield part

    async def Speculate(
        self,
        requests: AsyncIterator[draft_pb2.SpeculateRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Serves one verifier's stream until the verifier ends it.

        Reading and writing by hand saves a tenth of a round trip.
        """
        drafter = self._loaded()
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if not first.HasField("attach"):
            raise InvalidRequest("attach", "must be the stream's first message")
        limit = drafter.max_sessions
        if limit is not None and self._num_sessions >= limit:
            raise Overloaded(f"this draft is attached to {limit} verifier and serves no more")
        self._num_sessions += 1
        self._no_session.clear()
        try:
            await self._speculate(drafter, first.attach, context)
        finally:
            if drafter.device is not None and not device_works(drafter.device):
                logger.error("the GPU has failed this process for good: ending it")
                self._on_lost()
            self._num_sessions -= 1
            if self._num_sessions == 0:
                self._no_session.set()

    async def _speculate(
        self,
        drafter: Drafter,
        attach: draft_pb2.AttachRequest,
        context: grpc.aio.ServicerContext,
    ) -> None:
        session, response = await self._attach(drafter, attach)
        try:
            logger.info("attached: %s, epoch %d", attach.architecture or "verifier", attach.epoch)
            await context.write(draft_pb2.SpeculateResponse(attach=response))
            while (request := await context.read()) is not grpc.aio.EOF:
                if not request.HasField("step"):
                    raise InvalidRequest("step", "every message but the first is a step")
                answer = await session.step(request.step)
                if answer is not None:
                    await context.write(draft_pb2.SpeculateResponse(step=answer))
        except InvalidRequest as error:
            logger.warning("epoch %d broke the protocol: %s", attach.epoch, error)
            raise
        finally:
            logger.info("detached: epoch %d", attach.epoch)
            await self._close(session, drafter)

    async def _close(self, session: Session, drafter: Drafter) -> None:
        """Frees a session.

        A session on a GPU that hangs can never be freed, and would keep others from attaching.
        """
        on_gpu = drafter.device is not None and drafter.device.type == "cuda"
        try:
            async with asyncio.timeout(GPU_CLOSE_SECONDS if on_gpu else None):
                await session.close()
        except TimeoutError:
            logger.error("the GPU does not end its work: ending this process")
            self._on_lost()

    async def _attach(
        self, drafter: Drafter, attach: draft_pb2.AttachRequest
    ) -> tuple[Session, draft_pb2.AttachResponse]:
        loop = asyncio.get_running_loop()
        making = loop.run_in_executor(self._worker, self._make, drafter, attach)
        try:
            session, response = await asyncio.shield(making)
        except asyncio.CancelledError:
            # The stream ended meanwhile; what is being made must still be freed.
            session, _ = await making
            await session.close()
            raise
        except AttachRefused as error:
            self._metrics.refused_attaches.inc()
            # A verifier retries, and gets the same answer each time.
            if str(error) != self._refusal:
                self._refusal = str(error)
                logger.warning("refused to attach: %s", error)
            raise
        self._metrics.accepted_attaches.inc()
        self._refusal = ""
        response.epoch = attach.epoch
        return session, response

    def _make(
        self, drafter: Drafter, attach: draft_pb2.AttachRequest
    ) -> tuple[Session, draft_pb2.AttachResponse]:
        """Maps the arena, then creates the proposer; runs in the drafter's thread."""
        if attach.protocol != DRAFT_PROTOCOL:
            raise AttachRefused(
                "protocol", f"this draft speaks {DRAFT_PROTOCOL}, the verifier {attach.protocol}"
            )
        reader, exchange = open_arena(self._info, attach, drafter.device)
        with contextlib.ExitStack() as undo:
            for end in (reader, exchange):
                if end is not None:
                    undo.callback(end.close)
            proposer, response = drafter.attach(attach)
            proposer.hidden, proposer.exchange = reader, exchange
            undo.callback(proposer.close)
            proposer.prepare()
            undo.pop_all()
        return Session(proposer, self._worker, self._metrics), response

    def _loaded(self) -> Drafter:
        if self._drafter is None:
            raise Unavailable("the draft is still loading")
        return self._drafter
