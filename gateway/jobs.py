"""Checked requests, and what a verifier is asked for them."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from foredraft.api.verify.v1 import verify_pb2
from foredraft.errors import InvalidRequest, PromptTooLong
from foredraft.rpc.sampling import fill_sampling, fill_speculation
from foredraft.sampling.seeds import derive_seed
from foredraft.telemetry import tracing
from foredraft.types import SamplingParams, SpeculationParams
from gateway.security.limits import Caller, current_caller


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What a request may ask for beside its prompt and its sampling parameters.

    Attributes:
        name: Name that is unique among running jobs, used in logs and to abort the job; empty for a
            new one.
        call: Name of the request that the job belongs to, which aborts all its jobs; empty without
            one.
        stop: Stop strings.
        num_choices: Number of independent continuations.
        skip_special_tokens: Whether special tokens are left out of the text.
        keep_stop: Whether the stop string or token stays in the text.
        return_provenance: Whether to tell which tokens were drafted.
        speculation: Speculation parameters.
        priority: Higher is served first.
        timeout: Seconds after which the request ends with RequestTimeout; None for the server's
            own limit.
        functions: Names of the functions that may be called, in the order of the grammar's parts.
    """

    name: str = ""
    call: str = ""
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    skip_special_tokens: bool = True
    keep_stop: bool = False
    return_provenance: bool = False
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = 0
    timeout: float | None = None
    functions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job(JobOptions):
    """A checked request, with a name.

    Attributes:
        prompt: Token ids.
        sampling: Sampling parameters, with the seed set.
        timeout: Seconds after which the request ends with RequestTimeout.
        caller: The sender of the request: its limits apply, and its name decides which drafts its
            text may feed.
        arrived: time.monotonic() of the arrival.
        traceparent: Trace context that the client sent; empty without one.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    timeout: float = field(default=600.0, kw_only=True)
    caller: Caller = field(default_factory=current_caller, kw_only=True)
    arrived: float = field(default_factory=time.monotonic, kw_only=True)
    traceparent: str = field(default_factory=tracing.incoming, kw_only=True)

    @classmethod
    def of(
        cls, prompt: Sequence[int], sampling: SamplingParams, options: JobOptions, longest: float
    ) -> "Job":
        """Creates a job of checked parts, which runs at most `longest` seconds."""
        asked = {each.name: getattr(options, each.name) for each in fields(JobOptions)}
        asked["name"] = options.name or uuid.uuid4().hex
        asked["timeout"] = longest if options.timeout is None else min(options.timeout, longest)
        return cls(prompt, sampling, **asked)

    def seed_of(self, choice: int) -> int:
        """Returns the seed of one continuation."""
        seed = self.sampling.seed
        return seed if self.num_choices == 1 else derive_seed(seed, choice)


def submit_request(job: Job, choice: int) -> verify_pb2.SubmitRequest:
    """Returns the message that asks a verifier for one continuation."""
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
        PromptTooLong: The prompt leaves no room for a token, where one is asked for.
        InvalidRequest: The prompt is empty.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequest("prompt", "it has no tokens")
    room = context_length - num_prompt_tokens
    if room < min(sampling.max_new_tokens, 1):
        raise PromptTooLong(
            "prompt",
            f"it has {num_prompt_tokens} tokens; this model's maximum context length is"
            f" {context_length} tokens, with the output",
        )
    return shortened(sampling, room)


def shortened(sampling: SamplingParams, most: int) -> SamplingParams:
    """Limits the output length to `most` tokens."""
    if sampling.max_new_tokens <= most:
        return sampling
    return replace(sampling, max_new_tokens=most, min_new_tokens=min(sampling.min_new_tokens, most))
