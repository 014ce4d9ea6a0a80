"""Sends the requests of a stage, in an open or a closed loop, and records their answers."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from foredraft.bench.arrivals import Ramp, arrival_times
from foredraft.bench.http_client import ConnectionBroken, HttpClient
from foredraft.bench.peers import Peer
from foredraft.bench.prompts import Prompt
from foredraft.bench.records import Record
from foredraft.bench.stream import AnswerReader, StreamError

NextRequest = Callable[[], tuple[Prompt, bytes]]

ANSWER_SECONDS = 600.0  # maximum duration of an answer


@dataclass(frozen=True, slots=True)
class Stage:
    """Describes one load.

    Attributes:
        num_requests: Number of requests.
        rate: Requests per second of the open loop. Infinite without `max_concurrency`: all at once.
            Infinite with it: a closed loop, in which the next request is sent when one ends.
        max_concurrency: Maximum number of requests at the server. In an open loop a request may
            have to wait for others; its latency counts from its due time.
        ramp: Growth of the open loop's rate, instead of `rate`.
        burstiness: See `arrivals.arrival_times`.
    """

    num_requests: int
    rate: float = math.inf
    max_concurrency: int | None = None
    ramp: Ramp | None = None
    burstiness: float = 1.0
    seed: int = 1

    @property
    def is_open(self) -> bool:
        """Whether requests are sent by the clock and not by the answers."""
        return self.ramp is not None or not math.isinf(self.rate)

    @property
    def name(self) -> str:
        """A few words for tables."""
        limit = "" if self.max_concurrency is None else f", at most {self.max_concurrency}"
        if self.ramp is not None:
            return f"{self.ramp.start:g} to {self.ramp.end:g} req/s{limit}"
        if self.is_open:
            return f"{self.rate:g} req/s{limit}"
        if self.max_concurrency is None:
            return f"{self.num_requests} at once"
        return f"{self.max_concurrency} client{'s' * (self.max_concurrency > 1)}"


@dataclass(slots=True)
class StageResult:
    """Holds the results of a stage.

    Attributes:
        seconds: Time from its start to the end of its last answer.
        cpu_seconds: Processor time of this client.
        lags: Seconds between planned and actual sending, for each request of an open loop.
    """

    stage: Stage
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    lags: list[float] = field(default_factory=list)


class LoadGenerator:
    """Runs stages against one server.

    Args:
        client: Connections.
        peer: The server.
        next_request: Gives each request's prompt and body; called ahead of time in an open loop.
        timeout: Seconds for an answer.
        on_done: Called with every finished record.
    """

    def __init__(
        self,
        client: HttpClient,
        peer: Peer,
        next_request: NextRequest,
        *,
        timeout: float = ANSWER_SECONDS,
        on_done: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._client = client
        self._peer = peer
        self._next_request = next_request
        self._timeout = timeout
        self._on_done = on_done

    async def run(self, stage: Stage) -> StageResult:
        """Sends all of a stage's requests and waits for their ends."""
        result = StageResult(stage)
        # Made before the clock starts: bodies cost time that is not the server's.
        bodies = [self._next_request()[1] for _ in range(stage.num_requests)]
        cpu, start = time.process_time(), time.perf_counter()
        if stage.is_open or stage.max_concurrency is None:
            await self._open(stage, result, bodies, start)
        else:
            await self._closed(stage, result, bodies, start)
        result.records.sort(key=lambda record: record.index)
        result.seconds = max((record.end for record in result.records), default=0.0)
        result.cpu_seconds = time.process_time() - cpu
        return result

    async def _open(
        self, stage: Stage, result: StageResult, bodies: list[bytes], start: float
    ) -> None:
        due: np.ndarray = arrival_times(
            len(bodies),
            stage.rate,
            seed=stage.seed,
            burstiness=stage.burstiness,
            ramp=stage.ramp,
        )
        slots = asyncio.Semaphore(stage.max_concurrency or len(bodies) + 1)

        async def one(index: int, moment: float) -> None:
            async with slots:
                result.records.append(await self._send(index, moment, bodies[index], start))

        async with asyncio.TaskGroup() as group:
            for index, moment in enumerate(due.tolist()):
                delay = start + moment - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                result.lags.append(max(0.0, time.perf_counter() - start - moment))
                group.create_task(one(index, moment))

    async def _closed(
        self, stage: Stage, result: StageResult, bodies: list[bytes], start: float
    ) -> None:
        waiting = iter(enumerate(bodies))

        async def client() -> None:
            for index, body in waiting:
                due = time.perf_counter() - start
                result.records.append(await self._send(index, due, body, start))

        async with asyncio.TaskGroup() as group:
            for _ in range(stage.max_concurrency or 1):
                group.create_task(client())

    async def _send(self, index: int, due: float, body: bytes, start: float) -> Record:
        record = await send(self._client, self._peer, index, due, body, start, self._timeout)
        self._on_done(record)
        return record


async def send(
    client: HttpClient,
    peer: Peer,
    index: int,
    due: float,
    body: bytes,
    start: float,
    timeout: float = ANSWER_SECONDS,
) -> Record:
    """Sends one request and waits for its end, whether it succeeds or fails.

    Args:
        index: The request's number in its record.
        due: Seconds after `start` at which it was due.
        body: Body made by `Peer.body`.
        start: `time.perf_counter()` that the record's times count from.
        timeout: Maximum seconds for the answer.
    """
    record = Record(index, due, time.perf_counter() - start)
    reader = AnswerReader(record)
    try:
        async with asyncio.timeout(timeout):
            response = await client.post(
                peer.path, body, lambda now, data: reader.feed(now - start, data)
            )
        if response.status == 200:
            reader.finish()
        else:
            record.error = f"HTTP {response.status}"
            record.detail = response.body.decode("utf-8", "replace")[:500]
    except TimeoutError:
        record.error = "timeout"
    except ConnectionBroken as error:
        record.error, record.detail = "connection", str(error)
    except StreamError as error:
        record.error, record.detail = error.kind, error.detail
    if record.error:
        reader.settle()
    record.end = time.perf_counter() - start
    return record
