"""The socket between verifier and draft, which can be cut, delayed, stalled and garbled."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path

_READ_BYTES = 2**16


class Link:
    """Listens on a Unix socket and passes bytes to another one, both ways.

    Args:
        listen: Path of its socket.
        upstream: Function that returns the socket to connect to, called for each connection.
        rng: Random numbers of garbled bytes.

    Attributes:
        refuses: Whether new connections are closed at once.
        delay: Delay of each read, in seconds.
        stalls: Whether nothing is passed on.
        garbles: Share of reads in which a byte is changed.
    """

    def __init__(self, listen: Path, upstream: Callable[[], Path], rng: random.Random) -> None:
        self.listen = listen
        self.upstream = upstream
        self._rng = rng
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.reset()

    def reset(self) -> None:
        """Makes the link good again."""
        self.refuses = self.stalls = False
        self.delay = self.garbles = 0.0

    @property
    def num_open(self) -> int:
        """Number of connections that are open."""
        return len(self._tasks)

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_unix_server(self._serve, self.listen)

    async def stop(self) -> None:
        """Ends everything."""
        if self._server is not None:
            self._server.close()
        await self.cut()
        self.listen.unlink(missing_ok=True)

    async def cut(self) -> None:
        """Closes all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._pass(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            try:
                far_reader, far_writer = await asyncio.open_unix_connection(self.upstream())
            except OSError:
                writer.transport.abort()
                return
            ways = [
                asyncio.create_task(self._pump(reader, far_writer)),
                asyncio.create_task(self._pump(far_reader, writer)),
            ]
            try:
                # One way that ended ends both: gRPC half-closes nothing.
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                writer.transport.abort()
                far_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            if self.stalls:
                continue
            if self.delay:
                await asyncio.sleep(self.delay)
            if self._rng.random() < self.garbles:
                data = garble(data, self._rng)
            writer.write(data)
            await writer.drain()


def garble(data: bytes, rng: random.Random) -> bytes:
    """Returns the bytes with one to four of them changed."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] ^= rng.randint(1, 255)
    return bytes(changed)
