"""Runs checked requests: submits them to verifiers and streams chunks of text.

A continuation whose verifier is lost starts again as long as the client has seen nothing of it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from foredraft.api.verify.v1 import verify_pb2
from foredraft.errors import ForedraftError, InvalidRequest
from foredraft.text.tokenizer import Tokenizer
from gateway import metrics
from gateway.decoding import Chunk, SequenceDecoder
from gateway.errors import WaitedTooLong
from gateway.finishes import chunk_without_tokens, completion_of, raise_failure
from gateway.jobs import Job, submit_request
from gateway.merging import merge
from gateway.security.limits import Charge, current_caller
from gateway.stopwatch import Stopwatch
from gateway.verifier_connection import Ticket, VerifierLost
from gateway.verifier_pool import VerifierPool

# Seconds that a request waits for a verifier when none is usable.
FRESH_PATIENCE = 1.0
# Seconds to wait for the verifier's account of a continuation that met a stop string.
ACCOUNT_SECONDS = 2.0


class Generator:
    """Runs jobs on a pool of verifiers.

    Args:
        pool: Verifiers to run on.
        tokenizer: The model's tokenizer.
        max_queue_seconds: Seconds without a first token after which a continuation is given up; 0
            waits until its deadline.
    """

    def __init__(
        self, pool: VerifierPool, tokenizer: Tokenizer, max_queue_seconds: float = 0.0
    ) -> None:
        self._max_queue_seconds = max_queue_seconds
        self._pool = pool
        self._tokenizer = tokenizer
        self._running: dict[tuple[str, str], _Running] = {}  # by caller and name
        self._idle = asyncio.Event()
        self._idle.set()

    async def stream(
        self, job: Job, *, whole: bool = False, charge: Charge | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Yields chunks of all continuations of a job as they come; close it to cancel the job.

        Args:
            job: The request to run.
            whole: Whether to yield one chunk per continuation, at its end. A continuation
                without a yielded chunk survives the loss of its verifier.
            charge: Counter of the call's tokens, which are reserved already; None reserves the
                job's own.

        Raises:
            ForedraftError: A limit or the verifier refused the job, the verifier was lost, or the
                deadline passed.
        """
        name = self._free_name(job)
        running = self._running[name] = _Running(job.call)
        self._idle.clear()
        try:
            with _reserved([job]) if charge is None else contextlib.nullcontext(charge) as counter:
                choices = [
                    self._choice(job, i, running, whole, counter) for i in range(job.num_choices)
                ]
                # Every layer that a token passes costs; most jobs have one choice.
                if len(choices) == 1:
                    async with contextlib.aclosing(choices[0]) as only:
                        async for chunk in only:
                            yield chunk
                    return
                async with contextlib.aclosing(merge(choices)) as chunks:
                    async for _, chunk in chunks:
                        yield chunk
        finally:
            del self._running[name]
            if not self._running:
                self._idle.set()

    async def stream_all(
        self, jobs: Sequence[Job], *, whole: bool = False
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Streams the jobs of a call like `stream`; each chunk comes with its job's index."""
        if len(jobs) == 1:
            async with contextlib.aclosing(self.stream(jobs[0], whole=whole)) as chunks_of_one:
                async for chunk in chunks_of_one:
                    yield 0, chunk
            return
        for job in jobs:  # a call that is refused costs its key nothing
            self._free_name(job)
        with _reserved(jobs) as charge:
            streams = [self.stream(job, whole=whole, charge=charge) for job in jobs]
            async with contextlib.aclosing(merge(streams)) as chunks:
                async for item in chunks:
                    yield item

    async def complete(self, jobs: Sequence[Job]) -> list[list[Chunk]]:
        """Runs a call's jobs to their end; returns each job's continuations, each as one chunk.

        Raises:
            ForedraftError: A job failed like in `stream`, which ends all of them.
        """
        found: list[list[Chunk]] = [[] for _ in jobs]
        async with contextlib.aclosing(self.stream_all(jobs, whole=True)) as chunks:
            async for i, chunk in chunks:
                found[i].append(chunk)
        return [sorted(chunks, key=lambda chunk: chunk.index) for chunks in found]

    def _free_name(self, job: Job) -> tuple[str, str]:
        """Returns the name that a job runs under; refuses one that is running."""
        name = (job.caller.name, job.name)
        if name in self._running:
            raise InvalidRequest("request_id", f"{job.name!r} is running already")
        return name

    def abort(self, name: str) -> int:
        """Aborts the current caller's jobs whose own name or call's name this is.

        Their continuations finish as cancelled. Returns the number of jobs.
        """
        return self._abort(lambda own, call: name in (own, call))

    def abort_all(self) -> int:
        """Aborts all jobs of the current caller; returns their number."""
        return self._abort(lambda own, call: True)

    def _abort(self, is_meant: Callable[[str, str], bool]) -> int:
        mine = current_caller().name
        jobs = [
            running
            for (owner, name), running in self._running.items()
            if owner == mine and is_meant(name, running.call)
        ]
        for running in jobs:
            running.abort()
        return len(jobs)

    def end_all(self, error: ForedraftError) -> None:
        """Ends all jobs with an error, which their clients get as the last of an answer."""
        for running in self._running.values():
            running.end(error)

    async def wait_idle(self) -> None:
        """Returns when no job runs."""
        await self._idle.wait()

    async def _choice(
        self, job: Job, choice: int, running: "_Running", whole: bool, charge: Charge
    ) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of one continuation, with retries and measurements."""
        watch = Stopwatch(job.name, job.arrived, job.timeout, job.traceparent, charge)
        given = False
        patience = FRESH_PATIENCE
        try:
            if not job.sampling.max_new_tokens and job.sampling.prompt_logprobs is None:
                chunk = chunk_without_tokens(job, choice)
                assert chunk.completion is not None
                watch.finish(chunk.completion)
                yield chunk
                return
            while True:
                try:
                    attempt = self._attempt(job, choice, running, watch, patience)
                    async with contextlib.aclosing(attempt):
                        if whole:
                            yield await _collect(attempt, choice)
                            return
                        async for chunk in attempt:
                            given = True
                            yield chunk
                    return
                except VerifierLost:
                    patience = watch.remaining()
                    if given or patience <= 0:
                        raise
                    watch.start_again()
                    metrics.retries.inc()
        except BaseException as error:
            watch.fail(error)
            raise
        finally:
            watch.stop()

    async def _attempt(
        self, job: Job, choice: int, running: "_Running", watch: "Stopwatch", patience: float
    ) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of one continuation at one verifier."""
        connection = await self._pool.pick(job.prompt, min(patience, max(watch.remaining(), 0.0)))
        request = submit_request(job, choice)
        request.traceparent = watch.span.traceparent
        ticket = connection.submit(request, max(watch.remaining(), 0.001))
        running.add(ticket)
        try:
            decoder = SequenceDecoder(
                self._tokenizer,
                job.prompt,
                job.stop,
                job.sampling.min_new_tokens,
                job.keep_stop,
                job.skip_special_tokens,
            )
            outputs = await self._first(ticket)
            found: list[verify_pb2.TokenLogprob] = []  # of the prompt, until they are given
            while True:
                for output in outputs:
                    found.extend(output.prompt_logprobs)
                before = decoder.num_tokens
                text, tokens = decoder.feed(outputs)
                watch.tokens(decoder.num_tokens - before)
                finish = outputs[-1].finish if outputs[-1].HasField("finish") else None
                if finish is not None:
                    break
                is_stopped = decoder.stop_text is not None
                if is_stopped:
                    ticket.cancel()
                if text or tokens:
                    steps = decoder.take_steps()
                    yield Chunk(choice, text, tokens, steps=steps, prompt_logprobs=found)
                    text, tokens, found = "", [], []
                if is_stopped:
                    finish = await _account(ticket, len(job.prompt))
                    break
                outputs = await ticket.take()
            if tokens and finish.error.code == verify_pb2.ERROR_CODE_INVALID_ARGUMENT:
                # What came with the failure is text like any other; nobody runs the job again.
                yield Chunk(choice, text, tokens, steps=decoder.take_steps(), prompt_logprobs=found)
            raise_failure(finish, connection, job)
            if job.sampling.max_new_tokens:
                tail, rest = decoder.flush()
                end = completion_of(job, choice, decoder, finish)
                last = Chunk(choice, text + tail, tokens + rest, end, decoder.take_steps(), found)
            else:  # the verifier chose one token all the same
                last = chunk_without_tokens(job, choice, finish.cached_tokens)
                last.prompt_logprobs = found
            assert last.completion is not None
            watch.finish(last.completion)
            yield last
        finally:
            running.remove(ticket)
            ticket.close()

    async def _first(self, ticket: Ticket) -> list[verify_pb2.SequenceOutput]:
        """Waits for the first outputs of a continuation, at most max_queue_seconds."""
        seconds = self._max_queue_seconds
        try:
            async with asyncio.timeout(seconds or None):
                return await ticket.take()
        except TimeoutError:
            raise WaitedTooLong(f"no place was free within {seconds:g} s") from None


class _Running:
    """Holds the tickets of a running job, so that it can be ended from elsewhere."""

    def __init__(self, call: str) -> None:
        self.call = call
        self._tickets: set[Ticket] = set()
        self._aborted = False
        self._error: ForedraftError | None = None

    def add(self, ticket: Ticket) -> None:
        self._tickets.add(ticket)
        if self._aborted:
            ticket.cancel()
        if self._error is not None:
            self._fail(ticket, self._error)

    def remove(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)

    def abort(self) -> None:
        self._aborted = True
        for ticket in self._tickets:
            ticket.cancel()

    def end(self, error: ForedraftError) -> None:
        self._error = error
        for ticket in self._tickets:
            self._fail(ticket, error)

    @staticmethod
    def _fail(ticket: Ticket, error: ForedraftError) -> None:
        ticket.cancel()
        ticket.fail(error)


def _reserved(jobs: Sequence[Job]) -> contextlib.AbstractContextManager[Charge]:
    """Reserves the tokens of all jobs of a call at once."""
    num_prompt_tokens = sum(len(job.prompt) for job in jobs)
    most = sum(job.sampling.max_new_tokens * job.num_choices for job in jobs)
    return jobs[0].caller.charge(num_prompt_tokens, most)


async def _collect(attempt: AsyncGenerator[Chunk, None], choice: int) -> Chunk:
    """Joins all chunks of one continuation."""
    texts: list[str] = []
    result = Chunk(choice)
    async for chunk in attempt:
        texts.append(chunk.text)
        result.tokens.extend(chunk.tokens)
        result.steps.extend(chunk.steps)
        result.prompt_logprobs.extend(chunk.prompt_logprobs)
        result.completion = chunk.completion
    result.text = "".join(texts)
    return result


async def _account(ticket: Ticket, num_prompt_tokens: int) -> verify_pb2.Finish:
    """Waits for the finish of a cancelled request, which has its counts."""
    with contextlib.suppress(ForedraftError, TimeoutError):
        async with asyncio.timeout(ACCOUNT_SECONDS):
            while True:
                for output in await ticket.take():
                    if output.HasField("finish"):
                        return output.finish
    return verify_pb2.Finish(
        reason=verify_pb2.FINISH_REASON_CANCELLED, prompt_tokens=num_prompt_tokens
    )
