"""From a checked request to chunks of text: submit, stream, decode, stop, account; retries what nobody has seen."""

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

# How long a request that finds no verifier waits for one.
FRESH_PATIENCE = 1.0
# The least float32 above 0: a 0 in the message says that a field is not given.
LEAST = 2.0**-149
# How long the account of a continuation that met a stop string is waited for.
ACCOUNT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request.

    Attributes:
        name: Unique among those that run; for logs and for aborting.
        call: Name of the request that it is one prompt of, by which all of them are aborted; empty where it has none.
        prompt: Token ids.
        sampling: With the seed set.
        stop: Stop strings.
        num_choices: Independent continuations.
        keep_stop: Leave the stop string or token in the text.
        timeout: Seconds until the request ends with RequestTimeout.
        caller: Who asked: whose limits hold, and whose text may feed whose drafts.
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
        """The seed of one continuation."""
        seed = self.sampling.seed
        return seed if self.num_choices == 1 else derive_seed(seed, choice)


class Generator:
    """Runs jobs on a pool of verifiers.

    Args:
        pool: The verifiers.
        tokenizer: The model's.
        max_queue_seconds: A continuation that has got no token after so long is given up; 0 waits for its deadline.
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
        """Chunks of all continuations of a job as they come; close it to cancel the job.

        Args:
            job: What to generate.
            whole: Give one chunk per continuation, at its end. As long as nothing was given, a
                continuation survives the loss of its verifier.

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
        """Like `stream` for several jobs; each chunk comes with its job's index."""
        if len(jobs) == 1:
            async with contextlib.aclosing(self.stream(jobs[0])) as chunks_of_one:
                async for chunk in chunks_of_one:
                    yield 0, chunk
            return
        async with contextlib.aclosing(merge([self.stream(job) for job in jobs])) as chunks:
            async for item in chunks:
                yield item

    async def complete(self, jobs: Sequence[Job]) -> list[list[Chunk]]:
        """Every job's continuations, each as one chunk.

        Raises:
            ForedraftError: As `stream`; one job that fails ends all.
        """
        found: list[list[Chunk]] = [[] for _ in jobs]
        streams = [self.stream(job, whole=True) for job in jobs]
        async with contextlib.aclosing(merge(streams)) as chunks:
            async for i, chunk in chunks:
                found[i].append(chunk)
        return [sorted(chunks, key=lambda chunk: chunk.index) for chunks in found]

    def abort(self, name: str) -> int:
        """Ends the jobs of the current caller with this name of their own or of their call; their continuations finish
        as cancelled. Returns how many there were."""
        return self._abort(lambda own, call: name in (own, call))

    def abort_all(self) -> int:
        """Ends all jobs of the current caller; returns how many there were."""
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
        """One continuation, with retries and measurements."""
        watch = Stopwatch(job.name, job.arrived, job.timeout, job.traceparent, charge)
        given = False
        patience = FRESH_PATIENCE
        try:
            if not job.sampling.max_new_tokens:
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
        """One continuation at one verifier."""
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
            while True:
                before = decoder.num_tokens
                text, tokens = decoder.feed(outputs)
                watch.tokens(decoder.num_tokens - before)
                finish = outputs[-1].finish if outputs[-1].HasField("finish") else None
                if finish is None and decoder.stop_text is not None:
                    ticket.cancel()
                    if text or tokens:
                        yield Chunk(choice, text, tokens, steps=decoder.take_steps())
                    text, tokens = "", []
                    finish = await _account(ticket, len(job.prompt))
                if finish is None:
                    if text or tokens:
                        yield Chunk(choice, text, tokens, steps=decoder.take_steps())
                    outputs = await ticket.take()
                    continue
                _raise_failure(finish, connection)
                tail, rest = decoder.flush()
                completion = _completion(job, choice, decoder, finish)
                watch.finish(completion)
                yield Chunk(choice, text + tail, tokens + rest, completion, decoder.take_steps())
                return
        finally:
            running.remove(ticket)
            ticket.close()

    async def _first(self, ticket: Ticket) -> list[verify_pb2.SequenceOutput]:
        """The first outputs of a continuation."""
        seconds = self._max_queue_seconds
        try:
            async with asyncio.timeout(seconds or None):
                return await ticket.take()
        except TimeoutError:
            raise WaitedTooLong(f"no place was free within {seconds:g} s") from None


class _Running:
    """The tickets of a job that runs, so that it can be aborted from elsewhere."""

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
    """All chunks of one continuation as one."""
    texts: list[str] = []
    result = Chunk(choice)
    async for chunk in attempt:
        texts.append(chunk.text)
        result.tokens.extend(chunk.tokens)
        result.steps.extend(chunk.steps)
        result.completion = chunk.completion
    result.text = "".join(texts)
    return result


def _nothing(job: Job, choice: int) -> Chunk:
    """A continuation of no tokens, which nobody has to compute."""
    finish = verify_pb2.Finish(
        reason=verify_pb2.FINISH_REASON_LENGTH, prompt_tokens=len(job.prompt)
    )
    seed = job.seed_of(choice)
    return Chunk(choice, completion=Completion(FinishReason.LENGTH, None, None, 0, finish, seed))


async def _account(ticket: Ticket, num_prompt_tokens: int) -> verify_pb2.Finish:
    """Waits for the finish of a cancelled request; its figures are in it."""
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
    params, speculation = job.sampling, job.speculation
    sampling = verify_pb2.Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=max(params.top_p, LEAST),
        min_p=params.min_p,
        repetition_penalty=max(params.repetition_penalty, LEAST),
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias,
        seed=job.seed_of(choice),
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
    )
    if params.grammar is not None:
        setattr(sampling.grammar, params.grammar.kind.value, params.grammar.text)
    return verify_pb2.SubmitRequest(
        prompt=job.prompt,
        sampling=sampling,
        speculation=verify_pb2.Speculation(
            enabled=speculation.enabled,  # type: ignore[arg-type]
            num_steps=speculation.num_steps,
            topk=speculation.topk,
            num_draft_tokens=speculation.num_draft_tokens,
        ),
        priority=job.priority,
        key_label=job.caller.name,
        return_provenance=job.return_provenance,
        request_name=job.name,
    )


def fitted(sampling: SamplingParams, num_prompt_tokens: int, context_length: int) -> SamplingParams:
    """Sampling whose output ends at the context length at the latest.

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
            f"it has {num_prompt_tokens} tokens; this model's maximum context length is {context_length} tokens, with the "
            "output",
        )
    if sampling.max_new_tokens <= room:
        return sampling
    return replace(sampling, max_new_tokens=room, min_new_tokens=min(sampling.min_new_tokens, room))
