"""The gateway's side of encoding: a few processes, and jobs with limits of time and memory."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.errors import (
    CheckpointError,
    ForedraftError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from foredraft.rpc.lifetime import child_environment
from gateway import metrics
from gateway.encoding.wire import ANSWER_HEAD, Verdict, pack_request, unpack_tokens
from gateway.encoding.worker import READY

logger = logging.getLogger(__name__)

MAX_WAITING = 1024  # jobs in all; more are refused
# A job that takes longer leaves its place to a fresh process, so that quick ones do not wait for
# it.
OVERTIME_SECONDS = 0.25
MAX_OVERTIME = 4  # jobs that may run beside the places
LOAD_SECONDS = 120.0
START_SECONDS = 10.0


@dataclass(slots=True)
class _Process:
    """A forked process and its socket."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(slots=True)
class _Place:
    """A place for one process; a job that finds it empty forks a process.

    A job that takes too long leaves its place to the next.
    """

    process: _Process | None
    was_left: bool = False


class _Died(Exception):
    """The process of a job has died."""


class EncodingPool:
    """Encodes and decodes in processes of its own. `start` it in the running loop.

    Args:
        tokenizer_path: Directory of the tokenizer.
        template_path: File with a chat template instead of the directory's; "" for that.
        num_processes: Number of jobs that run at a time.
        timeout: Seconds that a job may take.
        memory_mb: MiB of memory that a job may take.
    """

    def __init__(
        self,
        tokenizer_path: str,
        template_path: str,
        *,
        num_processes: int,
        timeout: float,
        memory_mb: int,
    ) -> None:
        self._arguments = (tokenizer_path, template_path, str(memory_mb * 2**20))
        self._timeout = timeout
        self._num_processes = num_processes
        self._idle: asyncio.LifoQueue[_Process | None] = asyncio.LifoQueue()
        self._num_overtime = 0
        self._num_jobs = 0
        self._loader: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._forking = asyncio.Lock()
        self._jobs: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Loads the tokenizer and forks the processes.

        Raises:
            CheckpointError: The tokenizer does not load; the log says why.
        """
        for _ in range(self._num_processes):
            self._idle.put_nowait(await self._fork())

    async def encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        """Returns a text's token ids.

        Raises:
            InvalidRequest: The text takes too long, or too much memory; names the field.
            Overloaded: Too many jobs wait.
        """
        return unpack_tokens(await self._run(field, "encode", text, add_special_tokens))

    async def encode_chat(
        self, messages: Sequence[Any], variables: dict[str, Any], field: str
    ) -> list[int]:
        """Returns a conversation's token ids, by the chat template.

        Raises:
            InvalidRequest: The template refuses it, or it takes too long or too much memory.
            Overloaded: Too many jobs wait.
        """
        return unpack_tokens(await self._run(field, "chat", messages, variables))

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool, field: str) -> str:
        """Returns the text of token ids.

        Raises:
            Overloaded: Too many jobs wait.
        """
        found = await self._run(field, "decode", list(tokens), skip_special_tokens)
        return found.decode("utf-8", "surrogatepass")

    async def close(self) -> None:
        """Ends the processes; running jobs fail."""
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        while not self._idle.empty():
            process = self._idle.get_nowait()
            if process is not None:
                process.writer.close()
        await self._unload()

    async def _run(self, field: str, operation: str, *arguments: Any) -> bytes:
        if self._num_jobs >= MAX_WAITING:
            raise Overloaded("too many prompts wait for the tokenizer")
        # A client that goes away leaves its job to end, within its time, on a process that others
        # use later.
        job = asyncio.create_task(self._job(field, operation, arguments))
        self._jobs.add(job)
        self._num_jobs += 1
        job.add_done_callback(self._forget)
        return await asyncio.shield(job)

    def _forget(self, job: asyncio.Task[Any]) -> None:
        self._jobs.discard(job)
        self._num_jobs -= 1
        if not job.cancelled():
            job.exception()  # whoever waited may have gone

    async def _job(self, field: str, operation: str, arguments: Sequence[Any]) -> bytes:
        place = _Place(await self._idle.get())
        relief = asyncio.get_running_loop().call_later(OVERTIME_SECONDS, self._relieve, place)
        try:
            verdict, body = await self._attempt(place, pack_request(operation, *arguments))
        except TimeoutError:
            raise InvalidRequest(
                field, f"takes more than the {self._timeout:g} s that it may take to encode"
            ) from None
        except _Died:
            raise InvalidRequest(field, "takes too much memory to encode") from None
        finally:
            relief.cancel()
            self._leave(place)
        if verdict is Verdict.REFUSED:
            named, message = json.loads(body)
            raise InvalidRequest(named or field, message)
        if verdict is Verdict.FAILED:
            raise ForedraftError(f"the tokenizer failed: {body.decode()}")
        return body

    def _relieve(self, place: _Place) -> None:
        """Gives the place to another process, while this job goes on beside it."""
        if self._num_overtime < MAX_OVERTIME:
            self._num_overtime += 1
            place.was_left = True
            self._idle.put_nowait(None)

    def _leave(self, place: _Place) -> None:
        if not place.was_left:
            self._idle.put_nowait(place.process)
            return
        self._num_overtime -= 1
        if place.process is not None:
            place.process.writer.close()  # it ends itself

    async def _attempt(self, place: _Place, request: bytes) -> tuple[Verdict, bytes]:
        """Runs a job in the process at a place, forking one if the place is empty.

        The place is empty afterwards if the process had to be ended.
        """
        was_fresh = False
        while True:
            if place.process is None:
                place.process, was_fresh = await self._fork(), True
            try:
                async with asyncio.timeout(self._timeout):
                    return await _ask(place.process, request)
            except _Died:
                _kill(place, "memory")
                # An old one may have died before: only one that was new says something about the
                # job.
                if was_fresh:
                    raise
            except TimeoutError:
                _kill(place, "time")
                raise
            except BaseException:
                _kill(place, "failure")
                raise

    async def _fork(self) -> _Process:
        async with self._forking:
            loop = asyncio.get_running_loop()
            for _ in range(2):
                await self._load()
                assert self._control is not None
                ours, theirs = socket.socketpair()
                try:
                    with theirs:
                        socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                    async with asyncio.timeout(START_SECONDS):
                        number = await loop.sock_recv(self._control, 8)
                    if len(number) == 8:
                        ours.setblocking(False)
                        reader, writer = await asyncio.open_connection(sock=ours)
                        return _Process(int.from_bytes(number, "little"), reader, writer)
                except (OSError, TimeoutError) as error:
                    logger.warning("the encoding processes' parent is lost: %s", error)
                ours.close()
                await self._unload()
        raise ForedraftError("no encoding process could be started")

    async def _load(self) -> None:
        """Starts the process that the others are forked from, unless it runs.

        Raises:
            CheckpointError: It could not load the tokenizer.
            Unavailable: It did not load the tokenizer in time.
        """
        if self._loader is not None and self._loader.poll() is None:
            return
        await self._unload()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            number = theirs.fileno()
            # Not the loop's own way, whose fork would run gRPC's handlers; and in this thread,
            # whose end the process would not outlive.
            self._loader = subprocess.Popen(
                [sys.executable, "-m", "gateway.encoding.worker", str(number), *self._arguments],
                pass_fds=[number],
                env={**child_environment(), "TOKENIZERS_PARALLELISM": "false"},
            )
        self._control = ours
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                answer = await asyncio.get_running_loop().sock_recv(ours, len(READY))
        except TimeoutError:  # not the job's: that is for the time of encoding
            await self._unload()
            raise Unavailable(f"the tokenizer did not load within {LOAD_SECONDS:g} s") from None
        if answer != READY:
            await self._unload()
            raise CheckpointError("the tokenizer does not load in a process of its own")

    async def _unload(self) -> None:
        loader, self._loader = self._loader, None
        if self._control is not None:
            self._control.close()
            self._control = None
        if loader is not None:
            loader.kill()
            await asyncio.to_thread(loader.wait)


def _kill(place: _Place, why: str) -> None:
    """Ends a place's process."""
    process, place.process = place.process, None
    if process is None:
        return
    # It holds its end of the socket as long as it lives, so the number is still its own.
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.writer.close()
    metrics.encoding_kills.labels(why).inc()
    logger.warning("an encoding process ended over its job's %s", why)


async def _ask(process: _Process, request: bytes) -> tuple[Verdict, bytes]:
    try:
        process.writer.write(request)
        await process.writer.drain()
        verdict, size = ANSWER_HEAD.unpack(await process.reader.readexactly(ANSWER_HEAD.size))
        return Verdict(verdict), await process.reader.readexactly(size)
    except (OSError, EOFError) as error:
        raise _Died from error
