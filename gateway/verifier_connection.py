"""A connection to one verifier: a Run stream with requests multiplexed by id, and its health.

It reconnects by itself.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foredraft.api.verify.v1 import verify_pb2, verify_pb2_grpc
from foredraft.errors import ForedraftError, Overloaded, Unavailable
from foredraft.rpc.channel import aio_channel
from foredraft.rpc.tls import Follower, Identity
from gateway.errors import RequestTimeout, SlowClient

logger = logging.getLogger(__name__)

_lives = itertools.count(1)

MAX_BUFFERED_OUTPUTS = 1024  # engine steps that a client may lag behind before it is cancelled
MAX_LIVE_REQUESTS = 4096  # most requests of one gateway at one verifier
INFO_TIMEOUT = 5.0
# A restarted verifier is found soon; asking costs next to nothing.
MIN_BACKOFF, MAX_BACKOFF = 0.1, 0.5
AVOID_SECONDS = 1.0
# A verifier sends a message twice a second, however long its steps take; a silent one is chosen
# only if no other is left.
SILENT_SECONDS = 5.0
HEALTH_RETRY_SECONDS = 1.0
# A verifier that starts beside its gateway is waited for without a warning.
START_SECONDS = 60.0
SERVICE_NAME = "foredraft.api.verify.v1.VerifyService"
# The verifier ends a request at its deadline; a verifier that hangs is not waited for much longer.
DEADLINE_GRACE = 2.0


class VerifierLost(Unavailable):
    """A verifier's stream broke, or it is stopping, while a request ran there."""


class Ticket:
    """A request that runs at a verifier. A bounded number of outputs wait here until taken."""

    def __init__(self, connection: "VerifierConnection", number: int, timeout: float) -> None:
        self._connection = connection
        self._number = number
        self._outputs: list[verify_pb2.SequenceOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: ForedraftError | None = None
        self._finished = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(timeout + DEADLINE_GRACE, self._time_out)

    async def take(self) -> list[verify_pb2.SequenceOutput]:
        """Waits for outputs; returns all that have arrived.

        Raises:
            VerifierLost: The stream broke; outputs that were not taken are dropped.
            SlowClient: Outputs were not taken in time.
            RequestTimeout: The verifier did not answer by the deadline.
        """
        while True:
            if self._error is not None:
                raise self._error
            if self._outputs:
                outputs, self._outputs = self._outputs, []
                return outputs
            self._waiter = self._loop.create_future()
            await self._waiter

    def cancel(self) -> None:
        """Asks the verifier to end the request; it answers with a finish."""
        if not self._finished and self._error is None:
            self._connection.cancel(self._number)

    def close(self) -> None:
        """Gives the request up; no more outputs are delivered."""
        self.cancel()
        self._timer.cancel()
        self._connection.forget(self._number)

    def push(self, output: verify_pb2.SequenceOutput) -> None:
        """Adds an output; called by the connection."""
        self._finished = output.HasField("finish")
        self._outputs.append(output)
        if len(self._outputs) > MAX_BUFFERED_OUTPUTS:
            self.cancel()
            self.fail(SlowClient("the client reads too slowly"))
        self._wake()

    def fail(self, error: ForedraftError) -> None:
        """Ends the request with an error.

        A request that has finished still delivers its outputs.
        """
        if self._finished:
            return
        self._error = self._error or error
        self._outputs.clear()
        self._wake()

    def _time_out(self) -> None:
        self.cancel()
        self.fail(RequestTimeout("the deadline passed"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class VerifierConnection:
    """A connection to one verifier.

    Args:
        target: `host:port` or `unix:/path`.
        accept: Called with the verifier's model before it is used; raises ForedraftError to refuse
            it.
        on_change: Called when `ready` or its health changes.
        identity: Certificate for TLS over TCP.

    Attributes:
        ready: Whether the stream is open.
        load: The verifier's last report of its load.
        life: Number of the stream, unique among all verifiers. Prefixes cached before it may be
            gone.
    """

    def __init__(
        self,
        target: str,
        accept: Callable[[verify_pb2.GetModelInfoResponse], None],
        on_change: Callable[[], None],
        identity: Identity | None = None,
    ) -> None:
        self.target = target
        self.ready = False
        self.load = verify_pb2.Load()
        self.life = 0
        self._healthy = True
        self._heard = 0.0
        self._accept = accept
        self._on_change = on_change
        self._identity = identity
        self._follower: Follower | None = None
        if identity is not None:
            what = "certificate for the verifier"
            self._follower = Follower(identity, "--service-tls-*", what)
        self._use(self._make_channel())
        self._live: dict[int, Ticket] = {}
        self._outbox: asyncio.Queue[verify_pb2.RunRequest] = asyncio.Queue()
        self._next_number = 0
        self._avoid_until = 0.0
        self._task = asyncio.create_task(self._run(), name=f"verifier {target}")

    @property
    def usable(self) -> bool:
        """Whether it is connected, healthy, and not known to be stopping."""
        return (
            self.ready and self._healthy and asyncio.get_running_loop().time() >= self._avoid_until
        )

    @property
    def silent(self) -> bool:
        """Whether it has sent nothing for longer than a working verifier does."""
        return asyncio.get_running_loop().time() - self._heard > SILENT_SECONDS

    @property
    def busy(self) -> int:
        """Number of requests at the verifier, as far as known here."""
        return max(self.load.running + self.load.waiting, len(self._live))

    def submit(self, request: verify_pb2.SubmitRequest, timeout: float) -> Ticket:
        """Sends a request under a new id.

        Raises:
            Overloaded: This gateway has too many requests there.
        """
        if len(self._live) >= MAX_LIVE_REQUESTS:
            raise Overloaded(f"{MAX_LIVE_REQUESTS} requests run already")
        self._next_number += 1
        request.id = self._next_number
        request.timeout_seconds = max(timeout, 0.001)
        ticket = Ticket(self, request.id, timeout)
        self._live[request.id] = ticket
        self._outbox.put_nowait(verify_pb2.RunRequest(submit=request))
        return ticket

    def cancel(self, number: int) -> None:
        """Asks the verifier to end a request."""
        cancel = verify_pb2.CancelRequest(id=number)
        self._outbox.put_nowait(verify_pb2.RunRequest(cancel=cancel))

    def forget(self, number: int) -> None:
        """Drops all further outputs of a request."""
        self._live.pop(number, None)

    def avoid(self) -> None:
        """Makes the verifier unusable for AVOID_SECONDS, since it reported that it is stopping."""
        self._avoid_until = asyncio.get_running_loop().time() + AVOID_SECONDS

    async def flush_cache(self) -> int:
        """Drops cached prefixes; returns the number of pages freed."""
        self.life = next(_lives)
        answer = await self._stub.FlushCache(verify_pb2.FlushCacheRequest(), timeout=30)
        return int(answer.pages)

    async def close(self) -> None:
        """Ends the stream; live requests fail."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    def _use(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = verify_pb2_grpc.VerifyServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    def _make_channel(self) -> grpc.aio.Channel:
        return aio_channel(self.target, identity=self._identity)

    async def _follow_certificate(self) -> None:
        """Makes a new channel if the certificate has changed: a channel reads it once."""
        if self._follower is None:
            return
        channel = self._follower.changed(self._make_channel)
        if channel is not None:
            old = self._channel
            self._use(channel)
            await old.close()

    async def _run(self) -> None:
        backoff = MIN_BACKOFF
        said = ""
        loop = asyncio.get_running_loop()
        patient_until = loop.time() + START_SECONDS
        while True:
            starts = False
            try:
                await self._follow_certificate()
                info = await self._stub.GetModelInfo(
                    verify_pb2.GetModelInfoRequest(), timeout=INFO_TIMEOUT
                )
                self._accept(info)
                logger.info("connected to the verifier at %s", self.target)
                backoff, said, patient_until = MIN_BACKOFF, "", 0.0
                await self._stream()
            except grpc.RpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                starts = error.code() == grpc.StatusCode.UNAVAILABLE and loop.time() < patient_until
            except ForedraftError as error:
                reason = str(error)
            except Exception as error:
                logger.exception("the stream of the verifier at %s failed", self.target)
                reason = str(error)
            finally:
                self._lose()
            if starts and not said:
                logger.info("waiting for the verifier at %s", self.target)
                said = "waiting"
            elif not starts and reason != said:
                logger.warning("no verifier at %s: %s", self.target, reason)
                said = reason
            await asyncio.sleep(backoff * random.uniform(0.8, 1.2))
            backoff = min(backoff * 2, MAX_BACKOFF)

    async def _stream(self) -> None:
        """Runs one stream until it breaks; raises the error that broke it."""
        self._outbox = asyncio.Queue()
        call = self._stub.Run()
        loop = asyncio.get_running_loop()
        helpers = [
            asyncio.create_task(self._send(call, self._outbox)),
            asyncio.create_task(self._watch_health()),
        ]
        self.load = verify_pb2.Load()
        self.life = next(_lives)
        self._healthy = True
        self._heard = loop.time()
        self.ready = True
        self._on_change()
        try:
            async for message in call:
                self._heard = loop.time()
                if message.HasField("load"):
                    self.load = message.load
                for output in message.outputs:
                    ticket = self._live.get(output.id)
                    if ticket is not None:
                        ticket.push(output)
        finally:
            for task in helpers:
                task.cancel()
            call.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        raise Unavailable("the verifier ended the stream")

    @staticmethod
    async def _send(
        call: grpc.aio.StreamStreamCall, outbox: asyncio.Queue[verify_pb2.RunRequest]
    ) -> None:
        while True:
            await call.write(await outbox.get())

    async def _watch_health(self) -> None:
        """Follows the verifier's health; one without the health service counts as healthy."""
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        while True:
            try:
                async for answer in self._health.Watch(request):
                    healthy = answer.status == health_pb2.HealthCheckResponse.SERVING
                    if healthy != self._healthy:
                        self._healthy = healthy
                        logger.info(
                            "the verifier at %s is %s",
                            self.target,
                            "healthy" if healthy else "not serving",
                        )
                        self._on_change()
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    return
            await asyncio.sleep(HEALTH_RETRY_SECONDS)

    def _lose(self) -> None:
        live, self._live = self._live, {}
        was_ready, self.ready = self.ready, False
        for ticket in live.values():
            ticket.fail(VerifierLost("the verifier was lost"))
        if was_ready:
            self._on_change()
