"""The connection to a draft: attaches, exchanges steps, notices a dead or silent draft, attaches
again by itself.

The engine's thread sends and receives messages; a background thread connects and watches.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait

import grpc

from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.errors import DraftError, ForedraftError
from foredraft.rpc.channel import channel
from foredraft.rpc.errors import from_rpc_error
from foredraft.rpc.tls import Identity
from verify_service.connection.stream import DraftStream, StreamReader

INFO_TIMEOUT = 2.0
ATTACH_TIMEOUT = 30.0  # the draft allocates its KV meanwhile
FIRST_BACKOFF = 0.05
LONGEST_BACKOFF = 1.0
# The step timeout is extended by itself for every this many committed tokens: a draft on a slow CPU
# computes a few hundred a second.
TOKENS_PER_TIMEOUT = 256
_POLL_SECONDS = 0.25

logger = logging.getLogger(__name__)


class DraftClient:
    """Keeps one draft attached.

    `send`, `has_answer` and `receive` belong to one thread, the engine's. Everything else may be
    called from any.

    Args:
        target: `host:port` or `unix:/path`.
        make_attach: Makes the attach message from the draft's info and the number of the attach.
        step_timeout: Seconds that the answer to a step may take; longer for a step with many
            tokens.
        on_state: Called from the background thread with a line for the log whenever the state
            changes: "attached", or the reason why there is no draft.
        on_attached: Called from that thread with the number of each attach, once the draft has
            answered it.
        on_ended: Called from that thread when an attach has ended, with its number and, where the
            draft refused it, the error; frees the resources that `make_attach` created.
        identity: Certificate for TLS over TCP.

    Attributes:
        step_timeout: The argument of this name.
    """

    def __init__(
        self,
        target: str,
        make_attach: Callable[[draft_pb2.GetDraftInfoResponse, int], draft_pb2.AttachRequest],
        step_timeout: float,
        on_state: Callable[[str], None] | None = None,
        on_attached: Callable[[int], None] | None = None,
        on_ended: Callable[[int, ForedraftError | None], None] | None = None,
        identity: Identity | None = None,
    ) -> None:
        self._target = target
        self._identity = identity
        self._make_attach = make_attach
        self.step_timeout = step_timeout
        self._on_state = on_state
        self._on_attached = on_attached
        self._on_ended = on_ended
        self._state = ""
        self._changed = threading.Condition()
        # The condition guards all attributes below.
        self._info: draft_pb2.GetDraftInfoResponse | None = None
        self._may_attach = False
        self._closed = False
        self._stream: DraftStream | None = None  # attached and not known to be broken
        self._epoch = 0
        self._last_epoch = 0
        self._late_epoch = 0
        self._reason = ""  # why the last stream was dropped
        self._reader = StreamReader(self._read)
        self._pending: grpc.Future | None = None  # call that the background thread waits for
        self._thread = threading.Thread(target=self._run, name="draft-client", daemon=True)

    def start(self) -> None:
        """Starts connecting."""
        self._thread.start()

    def wait(self, timeout: float) -> draft_pb2.GetDraftInfoResponse | None:
        """Waits for the draft's info; returns None if it has not come within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._info is not None or self._closed, timeout)
            return self._info

    def allow_attach(self) -> None:
        """Allows the client to attach, and so to call `make_attach`."""
        with self._changed:
            self._may_attach = True
            self._changed.notify_all()

    @property
    def info(self) -> draft_pb2.GetDraftInfoResponse | None:
        """The draft's newest info; None before the first."""
        return self._info

    @property
    def epoch(self) -> int:
        """Number of the current attach, growing from 1; 0 while no draft is attached."""
        return self._epoch

    @property
    def late_epoch(self) -> int:
        """Number of the newest attach that ended as an answer did not come in time; 0 for none."""
        return self._late_epoch

    def send(
        self, request: draft_pb2.StepRequest, epoch: int | None = None, has_answer: bool = True
    ) -> None:
        """Sends a step; steps of one attach are numbered from 1.

        Args:
            request: The step.
            epoch: Number of the attach that the step is meant for; None for any.
            has_answer: Whether `receive` will be called for it; False for a step that stays on the
                GPU.

        Raises:
            DraftError: No draft is attached, or the attach is another than `epoch`.
        """
        with self._changed:
            stream = self._stream if epoch in (None, self._epoch) else None
        if stream is None:
            raise DraftError("no draft is attached")
        if request.step != stream.num_steps + 1:
            raise DraftError(
                f"step {request.step} does not follow step {stream.num_steps} of this attach"
            )
        stream.num_steps += 1
        if has_answer:
            num_tokens = sum(len(sequence.tokens) for sequence in request.sequences)
            stream.unanswered.append((request.step, num_tokens))
        stream.write(draft_pb2.SpeculateRequest(step=request))

    def has_answer(self, patience: float = 0.0) -> bool:
        """Returns whether `receive` would return at once: the answer to the oldest unanswered step
        has come, or never will.

        The first call starts the timeout of the answer.

        Args:
            patience: Seconds to wait. Another thread reads answers, so that the first call finds
                nothing without waiting.

        Raises:
            DraftError: No draft is attached, or no step waits for an answer.
        """
        stream = self._due()
        reading = stream.reading or self._reader.begin(stream)
        if patience and not reading.done():
            wait((reading,), patience)
        return reading.done()

    def receive(self) -> draft_pb2.StepResponse:
        """Waits for the answer to the oldest unanswered step.

        Raises:
            DraftError: The answer did not come in time, or the draft died or broke the protocol.
                The stream is dropped.
        """
        stream = self._due()
        expected, _ = stream.unanswered[0]
        reading, stream.reading = stream.reading, None
        try:
            response = self._read(stream) if reading is None else reading.result()
        except DraftError as error:
            raise self._drop(stream, str(error)) from None
        stream.unanswered.popleft()
        if not response.HasField("step"):
            raise self._drop(stream, f"the answer to step {expected} is no step")
        if response.step.step != expected:
            raise self._drop(stream, f"step {expected} was answered by step {response.step.step}")
        return response.step

    def drop(self, reason: str) -> DraftError:
        """Ends the current attach; the draft may attach again.

        Returns:
            The reason as an error.
        """
        stream = self._stream
        return DraftError(reason) if stream is None else self._drop(stream, reason)

    def close(self) -> None:
        """Ends the connection and the threads. Nothing may be sent or received afterwards."""
        with self._changed:
            self._closed = True
            if self._pending is not None:
                self._pending.cancel()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        self._reader.close()

    def _due(self) -> DraftStream:
        """Returns the stream that must bring the next answer."""
        stream = self._stream
        if stream is None:
            raise DraftError("no draft is attached")
        if not stream.unanswered:
            raise DraftError("no step waits for an answer")
        return stream

    def _read(self, stream: DraftStream) -> draft_pb2.SpeculateResponse:
        """Waits for the answer to the oldest unanswered step of a stream; `_watch` ends the wait
        when the answer is late.
        """
        _, num_tokens = stream.unanswered[0]
        timeout = self.step_timeout * (1 + num_tokens // TOKENS_PER_TIMEOUT)
        stream.deadline = deadline = time.monotonic() + timeout
        try:
            return stream.read()
        except grpc.RpcError as error:
            is_late = time.monotonic() >= deadline
            if error.code() == grpc.StatusCode.CANCELLED and is_late:
                raise DraftError(f"no answer within {timeout:g} s") from None
            raise DraftError(str(from_rpc_error(error))) from None
        finally:
            stream.deadline = None

    def _drop(self, stream: DraftStream, reason: str) -> DraftError:
        with self._changed:
            if self._stream is stream:
                self._stream, self._epoch, self._reason = None, 0, reason
                self._changed.notify_all()
        return DraftError(reason)

    # The methods below run in the background thread.

    def _run(self) -> None:
        backoff = FIRST_BACKOFF
        while not self._closed:
            started = time.monotonic()
            try:
                with channel(self._target, identity=self._identity) as connection:
                    self._attend(draft_pb2_grpc.DraftServiceStub(connection))
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                self._tell(f"not reachable: {_describe(error)}")
            except ForedraftError as error:
                self._tell(f"not attached: {error}")
            except Exception:
                logger.exception("attaching a draft failed")
            # A draft that breaks off soon after every attach must not be attached in a tight loop.
            if time.monotonic() - started > LONGEST_BACKOFF:
                backoff = FIRST_BACKOFF
            with self._changed:
                self._changed.wait_for(lambda: self._closed, backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)

    def _attend(self, stub: draft_pb2_grpc.DraftServiceStub) -> None:
        """Connects once, attaches, and stays until the stream is lost or the client closed."""
        asking = stub.GetDraftInfo.future(draft_pb2.GetDraftInfoRequest(), timeout=INFO_TIMEOUT)
        self.may_cancel(asking)
        info: draft_pb2.GetDraftInfoResponse = asking.result()
        with self._changed:
            self._info = info
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._may_attach or self._closed)
            if self._closed:
                return
        stream = DraftStream(stub)
        refusal: ForedraftError | None = None
        self._last_epoch += 1
        try:
            self._attach(stream, info, self._last_epoch)
            self._watch(stream)
        except ForedraftError as error:
            refusal = error
            raise
        finally:
            stream.end()
            if self._on_ended is not None:
                self._on_ended(self._last_epoch, refusal)

    def _attach(
        self, stream: DraftStream, info: draft_pb2.GetDraftInfoResponse, epoch: int
    ) -> None:
        request = self._make_attach(info, epoch)
        self.may_cancel(stream.call)
        timer = threading.Timer(ATTACH_TIMEOUT, stream.call.cancel)
        timer.start()
        try:
            stream.write(draft_pb2.SpeculateRequest(attach=request))
            response = stream.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            timer.cancel()
            timer.join()
        if not response.HasField("attach") or response.attach.epoch != epoch:
            raise DraftError("the draft's first message does not answer the attach")
        if self._on_attached is not None:
            self._on_attached(epoch)
        with self._changed:
            self._stream, self._epoch = stream, epoch
        self._tell("attached")

    def _watch(self, stream: DraftStream) -> None:
        stream.call.add_callback(self._wake)
        poll, reason = min(_POLL_SECONDS, self.step_timeout / 4), "the draft ended the stream"
        with self._changed:
            while self._stream is stream and not self._closed and stream.call.is_active():
                self._changed.wait(poll)
                deadline = stream.deadline
                if deadline is not None and time.monotonic() >= deadline:
                    reason, self._late_epoch = "no answer in time", self._last_epoch
                    stream.end()
        if self._closed:
            self._drop(stream, "closed")
            return
        self._drop(stream, reason)
        self._tell(f"lost: {self._reason}")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def may_cancel(self, call: grpc.Future) -> None:
        """Lets `close` end the wait for `call`; for `make_attach` too."""
        with self._changed:
            self._pending = call
            if self._closed:
                call.cancel()

    def _tell(self, state: str) -> None:
        if state != self._state and not self._closed:
            self._state = state
            if self._on_state is not None:
                self._on_state(state)


def _describe(error: grpc.RpcError | grpc.FutureCancelledError) -> str:
    return str(from_rpc_error(error)) if isinstance(error, grpc.RpcError) else "cancelled"
