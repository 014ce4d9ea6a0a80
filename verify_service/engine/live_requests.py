"""Requests of live sequences, their statistics, and their outputs that are still to be sent."""

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foredraft.errors import ForedraftError
from foredraft.types import FinishReason, SamplingParams, SpeculationParams
from verify_service import metrics
from verify_service.outputs import Finish, Load, Sink, StepOutput
from verify_service.scheduler.request import Sequence

if TYPE_CHECKING:  # llguidance may be absent
    from verify_service.grammar.matcher import CompiledGrammar


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request that has been validated.

    `tag` is the submitter's name for it; outputs go to `sink` in the engine's thread.

    A probe is the engine's own: always drafted for, and in no metric. With several drafts, `draft`
    names the only one to draft for it. `grammar` is the compiled grammar of `sampling`.
    """

    tag: int
    prompt: list[int]
    sampling: SamplingParams
    sink: Sink
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = 0
    timeout_seconds: float | None = None
    key_label: str = ""
    return_provenance: bool = False
    is_probe: bool = False
    draft: str = ""
    traceparent: str = ""
    grammar: "CompiledGrammar | None" = None


@dataclass(slots=True)
class Live:
    """Data that the engine keeps for a live sequence.

    Attributes:
        request: Request that the sequence belongs to.
        submitted: Time of `time.monotonic` at which it was submitted.
        queue_seconds: Seconds that it waited for admission.
        histogram: Numbers of verifications that accepted 1, 2, ... drafted tokens.
        is_lossy: Whether any verification may have changed the distribution of tokens.
    """

    request: EngineRequest
    submitted: float
    queue_seconds: float = 0.0
    histogram: list[int] = field(default_factory=list)
    is_lossy: bool = False

    def count(self, num_accepted: int, is_lossy: bool) -> None:
        """Counts one verification."""
        self.is_lossy |= is_lossy
        if num_accepted:
            missing = num_accepted - len(self.histogram)
            self.histogram += [0] * missing
            self.histogram[num_accepted - 1] += 1

    def histogram_of(self, num_steps: int) -> tuple[int, ...]:
        """Returns how many of `num_steps` verifications accepted 0, 1, ... drafted tokens."""
        return (num_steps - sum(self.histogram), *self.histogram) if num_steps else ()


class LiveRequests:
    """Holds requests by number, and their outputs of the current step.

    Attributes:
        by_number: Live requests by the engine's numbers.
        probes: Numbers of the engine's own requests.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, Live] = {}
        self.probes: set[int] = set()
        self._outputs: dict[Sink, list[StepOutput]] = {}

    def __getitem__(self, sequence: Sequence) -> Live:
        return self.by_number[sequence.request_id]

    def add(self, number: int, live: Live) -> None:
        """Adds a request."""
        self.by_number[number] = live
        if live.request.is_probe:
            self.probes.add(number)

    def queue(self, live: Live, output: StepOutput) -> None:
        """Queues an output for `emit`."""
        self._outputs.setdefault(live.request.sink, []).append(output)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: ForedraftError | None = None,
        output: StepOutput | None = None,
    ) -> None:
        """Queues the last output of a sequence that has left the scheduler, and drops it."""
        live = self.by_number.pop(sequence.request_id)
        if live.request.is_probe:
            self.probes.discard(sequence.request_id)
        else:
            metrics.REQUESTS.labels(reason.value).inc()
        finish = Finish(
            reason=reason,
            stop_token=sequence.stop_token,
            error=error,
            prompt_tokens=sequence.num_prompt,
            completion_tokens=sequence.num_output,
            cached_tokens=sequence.num_cached,
            verify_steps=sequence.num_steps,
            drafted_tokens=sequence.num_drafted,
            accepted_tokens=sequence.num_accepted,
            preemptions=sequence.num_preemptions,
            queue_seconds=live.queue_seconds,
            lossy=live.is_lossy,
            accepted_histogram=live.histogram_of(sequence.num_steps),
        )
        last = output or StepOutput(live.request.tag)
        self.queue(live, dataclasses.replace(last, finish=finish))

    def end_all(self, error: ForedraftError) -> None:
        """Queues the error as the last output of every request, and drops all requests."""
        for live in self.by_number.values():
            finish = Finish(FinishReason.ERROR, error=error)
            self.queue(live, StepOutput(live.request.tag, finish=finish))
        self.by_number.clear()
        self.probes.clear()

    def emit(self, load: Load) -> None:
        """Hands each submitter its queued outputs."""
        outputs, self._outputs = self._outputs, {}
        for sink, news in outputs.items():
            sink(news, load)

    @property
    def has_news(self) -> bool:
        """Whether outputs are queued."""
        return bool(self._outputs)
