"""Two-phase steps as CUDA graphs: the forward is one graph, the choice of tokens another.

Between the two the host sends what depends on the previous outcome, while the forward runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from foredraft.models.decoder import ModelOutput
from verify_service.executor.base import no_wait
from verify_service.executor.captured.graph_capture import GraphCapturer, without_logits
from verify_service.executor.captured.graph_store import GraphStore, Shortage
from verify_service.executor.captured.listener import StepListener
from verify_service.executor.captured.running_step import UNDER_WAY, RunningStep
from verify_service.executor.captured.step import DecodeStep, Forward, StepKind
from verify_service.executor.captured.step_buffers import StepBuffers
from verify_service.executor.records import STEP


@dataclass(frozen=True, slots=True)
class _Graphs:
    """Holds the two graphs of a step, and the output of the first."""

    forward: torch.cuda.CUDAGraph
    choice: torch.cuda.CUDAGraph
    output: ModelOutput


@dataclass(frozen=True, slots=True)
class TwoPhaseStep:
    """Stands for a two-phase step whose forward was started; `TwoPhaseGraphs.choose` starts the
    rest.

    Attributes:
        output: Output of the forward, as in `RunningStep`.
        num_sequences: Number of sequences without padding.
        turn: Index of the step's buffers.
        forwarded: Event at the end of the forward.
    """

    kind: StepKind
    output: ModelOutput
    num_sequences: int
    turn: int
    forwarded: torch.cuda.Event


class TwoPhaseGraphs:
    """Captures and replays two-phase steps.

    Args:
        step: The computation that is captured.
        buffers: Buffers of all steps of this computation.
        capturer: Captures the graphs.
        shortage: Whether memory has run out in a capture.
        listener: Hears of every step; None for nobody.

    Attributes:
        tables: Tables of such steps, which adjust logits.
    """

    def __init__(
        self,
        step: DecodeStep,
        buffers: StepBuffers,
        capturer: GraphCapturer,
        shortage: Shortage,
        listener: StepListener | None = None,
    ) -> None:
        self._step, self._buffers = step, buffers
        self._capturer, self._listener = capturer, listener
        self.tables = step.two_phase
        self._graphs: GraphStore[StepKind, _Graphs] = GraphStore(shortage)
        self._forwarded = [torch.cuda.Event() for _ in range(UNDER_WAY)]
        self._computed: Forward | None = None  # the newest step's, where it has no graphs

    def send_trees(self) -> None:
        """Copies the present trees of a draft to the host, for that step's `tables.trees`.

        Call it after `StepBuffers.next_records`.
        """
        self.tables.send_trees(self._buffers.turn, self._step.trees)

    def prepare(
        self, kind: StepKind, num_sequences: int, settle: Callable[[], None] = no_wait
    ) -> None:
        """Captures the graphs of `start`, unless they exist. See `DecodeGraphs.prepare`."""
        if not self.has_graph(kind):
            settle()
        if kind not in self._graphs:
            if self._listener is not None:
                self._listener.prepare(kind, num_sequences, self._buffers)
            self._buffers.upload(num_sequences)
            self._graphs.add(kind, partial(self._capture, kind))
            self._buffers.upload(num_sequences)  # capturing has changed the records

    def has_graph(self, kind: StepKind) -> bool:
        """See `DecodeGraphs.has_graph`."""
        return self._graphs.has_graphs(kind)

    def start(self, kind: StepKind, num_sequences: int) -> TwoPhaseStep:
        """Starts the forward of a step on the records that were sent."""
        self.prepare(kind, num_sequences)
        if self._listener is not None:
            self._listener.two_phase_step(kind, num_sequences, self._buffers)
        graphs, turn = self._graphs[kind], self._buffers.turn
        if graphs is None:
            self._computed = self._step.forward(kind)
            output = without_logits(self._computed.output)
        else:
            graphs.forward.replay()
            output = graphs.output
        forwarded = self._forwarded[turn]
        forwarded.record()
        return TwoPhaseStep(kind, output, num_sequences, turn, forwarded)

    def choose(self, step: TwoPhaseStep, num_masks: int) -> RunningStep:
        """Starts the rest of the newest step: adjusted logits, sampling, walk and commit.

        Args:
            num_masks: Number of rows of `tables.masks` that are filled in.
        """
        graphs, computed = self._graphs[step.kind], self._computed
        self._computed = None
        self.tables.upload_masks(step.turn, num_masks)
        if graphs is not None:
            graphs.choice.replay()
        else:
            assert computed is not None
            self._step.choose(step.kind, computed)
        return self._buffers.download(step.kind, step.num_sequences, step.output)

    def close(self) -> None:
        """Frees the graphs."""
        self._graphs.clear()

    def _capture(self, kind: StepKind) -> _Graphs:
        def run() -> None:
            # This run must not count tokens of sequences, and has no masks.
            self._step.inputs[: kind.batch, [STEP["mask"], STEP["adjusted"]]] = 0
            self._step.choose(kind, self._step.forward(kind))

        self._capturer.run_aside(run)
        forward_graph, forward = self._capturer.capture(lambda: self._step.forward(kind))
        choice_graph, _ = self._capturer.capture(lambda: self._step.choose(kind, forward))
        # No other graph of this memory runs between the two (see `PendingStep`), so nothing
        # overwrites the logits.
        return _Graphs(forward_graph, choice_graph, without_logits(forward.output))
