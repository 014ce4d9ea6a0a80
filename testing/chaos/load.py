"""Clients that ask one thing after another while something breaks."""

import asyncio
import random
import time
from collections.abc import Sequence

from testing.chaos.cases import KINDS, Asker, Case, Result

PAUSE_SECONDS = 0.05


class Load:
    """A few clients at once.

    Args:
        asker: Sends requests.
        cases: What to ask for.
        rng: Chooses.
        num_clients: Requests at a time.
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
        """Sends no more; returns all results once the last request has ended."""
        self._stop.set()
        await asyncio.gather(*self._tasks)
        return self.results

    async def _client(self, kind: str) -> None:
        while not self._stop.is_set():
            result = Result(kind, self._rng.choice(self._cases), time.monotonic())
            self.results.append(result)
            await self._asker.ask(kind, result.case, result)
            result.ended = time.monotonic()
            # Where each is refused at once, as while a gateway restarts, clients would only burn time.
            pause = PAUSE_SECONDS if result.outcome == "right" else 5 * PAUSE_SECONDS
            await asyncio.sleep(pause)
