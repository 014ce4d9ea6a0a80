"""Session of an attached verifier: runs its steps in order, owns its proposer, counts its metrics.

The service handles the stream itself.
"""

import asyncio
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from draft_service.drafters.base import Proposer
from draft_service.metrics import DrafterMetrics
from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import InvalidRequest
from foredraft.telemetry import tracing
from foredraft.telemetry.tracing import Span


@dataclass(slots=True)
class _Traced:
    """The span of a sequence, and the figures that it will report."""

    span: Span
    num_steps: int = 0
    num_extended: int = 0
    num_proposed: int = 0
    seen: int = field(default_factory=time.time_ns)  # time of its last step


class Session:
    """Runs the steps of one verifier.

    Args:
        proposer: Proposer of drafts; closed with the session.
        worker: The process's only drafting thread.
        metrics: Metrics of the algorithm.
    """

    def __init__(
        self, proposer: Proposer, worker: ThreadPoolExecutor, metrics: DrafterMetrics
    ) -> None:
        self._proposer = proposer
        self._worker = worker
        self._metrics = metrics
        self._num_steps = 0
        self._traced: dict[int, _Traced] = {}  # spans by slot
        metrics.sessions.inc()

    async def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse | None:
        """Answers one engine step; returns None for a step on the GPU, whose trees are its
        answer.

        Raises:
            InvalidRequest: It breaks the protocol.
        """
        try:
            if request.step != self._num_steps + 1:
                raise InvalidRequest(
                    "step", f"{request.step} after {self._num_steps}; steps count from 1"
                )
            self._num_steps += 1
            if self._proposer.is_brief(request):
                # Two changes of thread take longer than such a step.
                response = self._proposer.step(request)
            else:
                loop = asyncio.get_running_loop()
                response = await loop.run_in_executor(self._worker, self._proposer.step, request)
        except InvalidRequest:
            self._metrics.refused_steps.inc()
            raise
        response.step = request.step
        self._count(request, response)
        begins = (s.begin.traceparent for s in request.sequences if s.HasField("begin"))
        if self._traced or any(begins):
            self._trace(request, response)
        return None if _stays_on_device(request) else response

    async def close(self) -> None:
        """Frees the proposer and the arena, after the step that may still run."""
        self._metrics.sessions.dec()
        self._end_spans(list(self._traced))
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._worker, self._free))

    def _free(self) -> None:
        proposer = self._proposer
        try:
            proposer.close()
        finally:
            for end in (proposer.hidden, proposer.exchange):
                if end is not None:
                    end.close()

    def _trace(self, request: draft_pb2.StepRequest, response: draft_pb2.StepResponse) -> None:
        self._end_spans(request.released_slots)
        for sequence in request.sequences:
            if sequence.HasField("begin"):
                self._end_spans([sequence.slot])
                if sequence.begin.traceparent:
                    span = tracing.begin("draft", "server", sequence.begin.traceparent)
                    self._traced[sequence.slot] = _Traced(span)
            if traced := self._traced.get(sequence.slot):
                traced.num_extended += len(sequence.tokens)
                traced.num_steps += sequence.HasField("propose")
                traced.seen = time.time_ns()
        for proposal in response.proposals:
            if traced := self._traced.get(proposal.slot):
                traced.num_proposed += len(proposal.tokens)

    def _end_spans(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if traced := self._traced.pop(slot, None):
                traced.span.end(
                    {
                        "foredraft.draft_steps": traced.num_steps,
                        "foredraft.extended_tokens": traced.num_extended,
                        "foredraft.proposed_tokens": traced.num_proposed,
                    },
                    # Of a release the draft hears with the next step, whenever that is.
                    ended=traced.seen,
                )

    def _count(self, request: draft_pb2.StepRequest, response: draft_pb2.StepResponse) -> None:
        metrics = self._metrics
        metrics.steps.inc()
        if _stays_on_device(request):
            metrics.device_steps.inc()
            return
        metrics.extended_tokens.inc(sum(len(sequence.tokens) for sequence in request.sequences))
        metrics.proposed_tokens.inc(sum(len(proposal.tokens) for proposal in response.proposals))
        metrics.extend_seconds.observe(response.extend_microseconds * 1e-6)
        metrics.draft_seconds.observe(response.draft_microseconds * 1e-6)


def _stays_on_device(request: draft_pb2.StepRequest) -> bool:
    return bool(request.sequences) and request.sequences[0].HasField("device_row")
