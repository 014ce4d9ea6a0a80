"""Runs checked requests: submits them to verifiers and streams chunks of text.

A continuation whose verifier is lost starts again as long as the client has seen nothing of it.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from foredraft.api.verify.v1 import verify_pb2
from foredraft.errors import (
    ForedraftError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
)
from foredraft.rpc.sampling import fill_sampling, fill_speculation
from foredraft.sampling.seeds import derive_seed
from foredraft.telemetry import tracing
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason, SamplingParams, SpeculationParams
from gateway import metrics
from gateway.decoding import Chunk, Completion, SequenceDecoder
from gateway.errors import RequestTimeout, WaitedTooLong
from gateway.merging import merge
from gateway.security.limits import Caller, Charge, current_caller
from gateway.stopwatch import Stopwatch
from gateway.verifier_connection import Ticket, VerifierConnection, VerifierLost
from gateway.verifier_pool import VerifierPool

# Seconds that a request waits for a verifier when none is usable.
FRESH_PATIENCE = 1.0
# Seconds to wait for the verifier's account of a continuation that met a stop string.
ACCOUNT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request.

    Attributes:
        name: Name that is unique among running jobs, used in logs and to abort the job.
        call: Name of the request that the job belongs to, which aborts all its jobs; empty without
            one.
        prompt: Token ids.
        sampling: Sampling parameters, with the seed set.
        stop: Stop strings.
        num_choices: Number of independent continuations.
        keep_stop: Whether the stop string or token stays in the text.
        timeout: Seconds after which the request ends with RequestTimeout.
        caller: The sender of the request: its limits apply, and its name decides which drafts its
            text may feed.
        arrived: time.monotonic() of the arrival.
        traceparent: Trace context that the client sent; empty without one.
    """

    name: str
    prompt: Sequence[int]
    sampling: SamplingParams
    call: str = ""
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    skip_special_tokens: bool = True
    keep_stop: bool = False
    return_provenance: bool = False
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = 0
    timeout: float = 600.0
    caller: Caller = field(default_factory=current_caller)
    arrived: float = field(default_factory=time.monotonic)
    traceparent: str = field(default_factory=tracing.incoming)

    def seed_of(self, choice: int) -> int:
        """Returns the seed of one continuation."""
        seed = self.sampling.seed
        return seed if self.num_choices == 1 else derive_seed(seed, choice)


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

    async def stream(self, job: Job, *, whole: bool = False) -> AsyncGenerator[Chunk, None]:
        """Yields chunks of all continuations of a job as they come; close it to cancel the job.

        Args:
            job: The request to run.
            whole: Whether to yield one chunk per continuation, at its end. A continuation
                without a yielded chunk survives the loss of its verifier.

        Raises:
            ForedraftError: The verifier refused the job, it was lost, or the deadline passed.
        """
        name = (job.caller.name, job.name)
        if name in self._running:
            raise InvalidRequest("request_id", f"{job.name!r} is running already")
        running = self._running[name] = _Running(job.call)
        self._idle.clear()
        try:
            most = job.sampling.max_new_tokens * job.num_choices
            with job.caller.charge(len(job.prompt), most) as charge:
                choices = [
                    self._choice(job, i, running, whole, charge) for i in range(job.num_choices)
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

    async def stream_all(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Streams several jobs like `stream`; each chunk comes with its job's index."""
        if len(jobs) == 1:
            async with contextlib.aclosing(self.stream(jobs[0])) as chunks_of_one:
                async for chunk in chunks_of_one:
                    yield 0, chunk
            return
        async with contextlib.aclosing(merge([self.stream(job) for job in jobs])) as chunks:
            async for item in chunks:
                yield item

    async def complete(self, jobs: Sequence[Job]) -> list[list[Chunk]]:
        """Runs jobs to their end; returns each job's continuations, each as one chunk.

        Raises:
            ForedraftError: A job failed like in `stream`, which ends all of them.
        """
        found: list[list[Chunk]] = [[] for _ in jobs]
        streams = [self.stream(job, whole=True) for job in jobs]
        async with contextlib.aclosing(merge(streams)) as chunks:
            async for i, chunk in chunks:
                found[i].append(chunk)
        return [sorted(chunks, key=lambda chunk: chunk.index) for chunks in found]

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
                chunk = _nothing(job, choice)
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
        request = _submit_request(job, choice)
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
                if finish is None and decoder.stop_text is not None:
                    ticket.cancel()
                    if text or tokens:
                        steps = decoder.take_steps()
                        yield Chunk(choice, text, tokens, steps=steps, prompt_logprobs=found)
                        found = []
                    text, tokens = "", []
                    finish = await _account(ticket, len(job.prompt))
                if finish is None:
                    if text or tokens:
                        steps = decoder.take_steps()
                        yield Chunk(choice, text, tokens, steps=steps, prompt_logprobs=found)
                        found = []
                    outputs = await ticket.take()
                    continue
                _raise_failure(finish, connection)
                if not job.sampling.max_new_tokens:
                    # The verifier chose one token all the same.
                    chunk = _nothing(job, choice, finish.cached_tokens)
                    chunk.prompt_logprobs = found
                    assert chunk.completion is not None
                    watch.finish(chunk.completion)
                    yield chunk
                    return
                tail, rest = decoder.flush()
                completion = _completion(job, choice, decoder, finish)
                watch.finish(completion)
                steps = decoder.take_steps()
                yield Chunk(choice, text + tail, tokens + rest, completion, steps, found)
                return
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
    """Holds the tickets of a running job, so that it can be aborted from elsewhere."""

    def __init__(self, call: str) -> None:
        self.call = call
        self._tickets: set[Ticket] = set()
        self._aborted = False

    def add(self, ticket: Ticket) -> None:
        self._tickets.add(ticket)
        if self._aborted:
            ticket.cancel()

    def remove(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)

    def abort(self) -> None:
        self._aborted = True
        for ticket in self._tickets:
            ticket.cancel()


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


def _nothing(job: Job, choice: int, num_cached: int = 0) -> Chunk:
    """Returns the chunk of a continuation without tokens."""
    finish = verify_pb2.Finish(
        reason=verify_pb2.FINISH_REASON_LENGTH,
        prompt_tokens=len(job.prompt),
        cached_tokens=num_cached,
    )
    seed = job.seed_of(choice)
    return Chunk(choice, completion=Completion(FinishReason.LENGTH, None, None, 0, finish, seed))


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


def _completion(
    job: Job, choice: int, decoder: SequenceDecoder, finish: verify_pb2.Finish
) -> Completion:
    stop_token = None
    if decoder.stop_text is not None or finish.reason == verify_pb2.FINISH_REASON_STOP:
        reason = FinishReason.STOP
        if decoder.stop_text is None and finish.HasField("stop_token"):
            stop_token = finish.stop_token
    elif finish.reason == verify_pb2.FINISH_REASON_LENGTH:
        reason = FinishReason.LENGTH
    else:
        reason = FinishReason.CANCELLED
    return Completion(
        reason, decoder.stop_text, stop_token, decoder.num_tokens, finish, job.seed_of(choice)
    )


def _raise_failure(finish: verify_pb2.Finish, connection: VerifierConnection) -> None:
    if finish.reason == verify_pb2.FINISH_REASON_DEADLINE:
        raise RequestTimeout("the deadline passed")
    if finish.reason != verify_pb2.FINISH_REASON_ERROR:
        return
    error = finish.error
    if error.code == verify_pb2.ERROR_CODE_INVALID_ARGUMENT:
        kind = PromptTooLong if error.field == "prompt" else InvalidRequest
        raise kind(error.field, error.message)
    if error.code == verify_pb2.ERROR_CODE_OVERLOADED:
        raise Overloaded(error.message, error.retry_after_seconds)
    if error.code == verify_pb2.ERROR_CODE_UNAVAILABLE:
        connection.avoid()
        raise VerifierLost(error.message)
    raise ForedraftError(error.message)


def _submit_request(job: Job, choice: int) -> verify_pb2.SubmitRequest:
    request = verify_pb2.SubmitRequest(
        prompt=job.prompt,
        priority=job.priority,
        key_label=job.caller.name,
        return_provenance=job.return_provenance,
        request_name=job.name,
    )
    fill_sampling(request.sampling, job.sampling)
    request.sampling.seed = job.seed_of(choice)
    # For a request of only prompt log-probabilities the verifier chooses one token, not returned.
    request.sampling.max_new_tokens = max(1, job.sampling.max_new_tokens)
    fill_speculation(request.speculation, job.speculation)
    return request


def fitted(sampling: SamplingParams, num_prompt_tokens: int, context_length: int) -> SamplingParams:
    """Limits the output length so that prompt and output fit the context length.

    Raises:
        PromptTooLong: The prompt leaves no room for a token.
        InvalidRequest: The prompt is empty.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequest("prompt", "it has no tokens")
    room = context_length - num_prompt_tokens
    if room < 1:
        raise PromptTooLong(
            "prompt",
            f"it has {num_prompt_tokens} tokens; this model's maximum context length is"
            f" {context_length} tokens, with the output",
        )
    if sampling.max_new_tokens <= room:
        return sampling
    return replace(sampling, max_new_tokens=room, min_new_tokens=min(sampling.min_new_tokens, room))
