"""Clients that send one request after another while something breaks."""

import asyncio
import random
import time
from collections.abc import Sequence

from testing.chaos.cases import KINDS, Asker, Case, Result

PAUSE_SECONDS = 0.05


class Load:
    """Runs a few clients at once.

    Args:
        asker: Sends requests.
        cases: Requests to send.
        rng: Random choice of requests.
        num_clients: Number of concurrent requests.
    """

    def __init__(
        self, asker: Asker, cases: Sequence[Case], rng: random.Random, num_clients: int
    ) -> None:
        self._asker = asker
        self._cases = cases
        self._rng = rng
        self._num_clients = num_clients
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.results: list[Result] = []

    def start(self) -> None:
        """Begins."""
        self._tasks = [
            asyncio.create_task(self._client(KINDS[i % len(KINDS)]))
            for i in range(self._num_clients)
        ]

    async def stop(self) -> list[Result]:
        """Sends no more requests; returns all results once the last has ended."""
        self._stop.set()
        await asyncio.gather(*self._tasks)
        return self.results

    async def _client(self, kind: str) -> None:
        while not self._stop.is_set():
            result = Result(kind, self._rng.choice(self._cases), time.monotonic())
            self.results.append(result)
            await self._asker.ask(kind, result.case, result)
            result.ended = time.monotonic()
            # Where each is refused at once, as while a gateway restarts, clients would only burn
            # time.
            pause = PAUSE_SECONDS if result.outcome == "right" else 5 * PAUSE_SECONDS
            await asyncio.sleep(pause)
