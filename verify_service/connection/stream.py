"""One Speculate call, and a thread that reads its answers for callers that must not wait."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.errors import DraftError

Reading = Future[draft_pb2.SpeculateResponse]


class DraftStream:
    """One Speculate call. Its requests go through a queue to a thread of gRPC.

    Attributes:
        call: The call.
        unanswered: Step number and number of sent tokens of each step that `receive` was not called
            for.
        num_steps: Number of steps sent.
        reading: Oldest unread answer, where another thread reads it; else None.
        deadline: Latest time of `time.monotonic` for the answer that is being read.
    """

    def __init__(self, stub: draft_pb2_grpc.DraftServiceStub) -> None:
        self._requests: queue.SimpleQueue[draft_pb2.SpeculateRequest | None] = queue.SimpleQueue()
        self.call = stub.Speculate(iter(self._requests.get, None))
        self.unanswered: deque[tuple[int, int]] = deque()
        self.num_steps = 0
        self.reading: Reading | None = None
        self.deadline: float | None = None

    def write(self, request: draft_pb2.SpeculateRequest) -> None:
        """Sends a message."""
        self._requests.put(request)

    def read(self) -> draft_pb2.SpeculateResponse:
        """Waits for the next message and returns it; cancelling the call ends the wait."""
        try:
            response: draft_pb2.SpeculateResponse = next(self.call)
        except StopIteration:
            raise DraftError("the draft ended the stream") from None
        return response

    def end(self) -> None:
        """Ends the call."""
        self._requests.put(None)
        self.call.cancel()


class StreamReader:
    """Reads answers in a thread of its own, since gRPC cannot tell whether an answer has come.

    The first answer starts the thread.
    """

    def __init__(self, read: Callable[[DraftStream], draft_pb2.SpeculateResponse]) -> None:
        self._read = read
        self._due: queue.SimpleQueue[tuple[DraftStream, Reading] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, stream: DraftStream) -> Reading:
        """Starts to read the next message of a stream; its end makes the future fail."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="draft-reader", daemon=True)
            self._thread.start()
        reading = stream.reading = Reading()
        self._due.put((stream, reading))
        return reading

    def close(self) -> None:
        """Ends the thread. All streams must have ended."""
        if self._thread is not None:
            self._due.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            stream, reading = due
            try:
                answer = self._read(stream)
            except BaseException as error:
                reading.set_exception(error)
            else:
                reading.set_result(answer)
            del due, stream, reading  # keeps no references to a stream that has ended
