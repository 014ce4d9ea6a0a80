"""Decode steps as CUDA graphs: trees in, the target's forward, sampling, walk and commit, tokens
out.

Every step has a fixed shape: B sequences of R rows, padded, with one graph for each `StepKind`,
which says B, R and what else the step does. Lengths, pages and trees are read from device memory,
so a step needs one upload, one launch and one download. A step may start before the host knows the
outcome of the previous one.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from foredraft.models.decoder import ModelOutput
from verify_service.executor.base import no_wait
from verify_service.executor.captured.graph_capture import GraphCapturer, without_logits
from verify_service.executor.captured.graph_store import GraphStore, Shortage
from verify_service.executor.captured.listener import StepListener
from verify_service.executor.captured.running_step import RunningStep
from verify_service.executor.captured.shapes import PaddedShapes
from verify_service.executor.captured.step import DecodeStep, StepKind
from verify_service.executor.captured.step_buffers import StepBuffers
from verify_service.executor.captured.two_phase_graphs import TwoPhaseGraphs

_Graph = tuple[torch.cuda.CUDAGraph, ModelOutput]


class DecodeGraphs:
    """Captures and replays decode steps of one model over one cache.

    Args:
        step: The computation that is captured.
        listener: Hears of every step; None for nobody.
        capturer: Captures the graphs; by default as CUDA does.

    Attributes:
        shapes: Shapes that steps are padded to.
        buffers: Buffers of all steps, two-phase ones too; filled in before a step starts.
        two_phase: The steps whose requests ask for more than the sampling rule.
        layers: Layers whose input (the residual stream) graphs keep for a draft; set by `warm_up`.
        trees: int32 [max_batch, 2, max_rows - 1]: proposals of a draft on the device, for records
            that refer to them.
        accepted, accepted_index: Outcome of the newest step for a draft; see `steps.Ended`.
        pool: Memory of the graphs; shared with other graphs that never run at the same time.
        shortage: Whether that memory has run out.
    """

    def __init__(
        self,
        step: DecodeStep,
        listener: StepListener | None = None,
        capturer: GraphCapturer | None = None,
    ) -> None:
        self._step, self._listener = step, listener
        self.shapes = PaddedShapes(step.max_batch, step.max_rows)
        self.buffers = StepBuffers(
            step, self.shapes, on_pages=None if listener is None else listener.pages
        )
        self._capturer = capturer or GraphCapturer(step)
        self.shortage = Shortage()
        self.two_phase = TwoPhaseGraphs(step, self.buffers, self._capturer, self.shortage, listener)
        self.layers: tuple[int, ...] = ()
        self.trees = step.trees
        self.accepted, self.accepted_index = step.accepted, step.accepted_index
        self.pool = self._capturer.pool
        self._steps: GraphStore[StepKind, _Graph] = GraphStore(self.shortage)
        self._forwards: GraphStore[StepKind, _Graph] = GraphStore(self.shortage)
        self._later: list[StepKind] = []  # steps to capture while the engine idles, the last first

    def prepare(
        self, kind: StepKind, num_sequences: int, settle: Callable[[], None] = no_wait
    ) -> None:
        """Captures the graph of `start` from the records that are filled in, unless it exists.

        Call it before the stream waits for a draft: capturing waits for the stream, so nothing
        could end that wait.

        Args:
            settle: See `Step`; called where there is no graph.
        """
        if not self.has_graph(kind):
            settle()
        if kind not in self._steps:
            if self._listener is not None:
                self._listener.prepare(kind, num_sequences, self.buffers)
            self.buffers.upload(num_sequences)
            compute = partial(self._compute, kind)
            self._steps.add(kind, partial(self._capturer.run_and_capture, compute))

    def graphs_of(self, kind: StepKind) -> "DecodeGraphs | TwoPhaseGraphs":
        """Returns the graphs that run steps of a kind: these, or `two_phase`."""
        return self.two_phase if kind.is_two_phase else self

    def has_graph(self, kind: StepKind) -> bool:
        """Returns whether steps of a kind were captured; others run operation by operation."""
        return self._steps.has_graphs(kind)

    def start(self, kind: StepKind, num_sequences: int) -> RunningStep:
        """Starts a whole step on the records that were sent.

        At most one step that was started before may be running.
        """
        self.prepare(kind, num_sequences)
        if self._listener is not None:
            self._listener.step(kind, num_sequences, self.buffers)
        output = _run(self._steps[kind], partial(self._compute, kind))
        return self.buffers.download(kind, num_sequences, output)

    def forward(self, kind: StepKind, num_sequences: int) -> ModelOutput:
        """Runs the target alone, for batches whose tokens the sampler chooses.

        Returns:
            Logits and hidden states of all B x R rows, padding included; valid until the next step.
        """
        if self._listener is not None:
            self._listener.forward(kind, num_sequences, self.buffers)

        def compute() -> ModelOutput:
            return self._step.forward(kind).output

        if kind not in self._forwards:
            self._forwards.add(kind, partial(self._capturer.run_and_capture, compute))
        return _run(self._forwards[kind], compute)

    def runs(self, layers: Sequence[int]) -> list[Callable[[], object]]:
        """Returns runs that compile the kernels of all steps, those of `capture_next` too, for
        `compile_ahead`.
        """
        kinds = [
            StepKind(batch, rows, tuple(layers), is_filtered=is_filtered)
            for batch, rows in self.shapes.all()
            for is_filtered in (True, False)
        ]
        kinds.append(StepKind(1, 1, tuple(layers), is_filtered=True, is_two_phase=True))
        kinds += [StepKind(*shape, tuple(layers), shares_keys=True) for shape in self._can_share()]
        return [partial(self._try, kind) for kind in kinds]

    def warm_up(self, layers: Sequence[int]) -> None:
        """Captures the plain step of every shape, the largest first, since the others then fit its
        memory.

        Of steps with filters it captures the largest; `capture_next` makes the others, and those
        that share keys, later.
        """
        self.layers = tuple(layers)
        largest, *others = self.shapes.all()
        self.idle_step(StepKind(*largest, self.layers, is_filtered=True))
        for shape in (largest, *others):
            self.idle_step(StepKind(*shape, self.layers))
        self._later = [
            StepKind(*shape, self.layers, is_filtered=is_filtered, shares_keys=True)
            for is_filtered in (True, False)
            for shape in self._can_share()
        ]
        self._later += [StepKind(*shape, self.layers, is_filtered=True) for shape in others]
        # Others are captured when they are needed; their kernels are ready then.
        self.buffers.fill_padding(1)
        self.buffers.upload(1)
        kind = StepKind(1, 1, self.layers, is_filtered=True, is_two_phase=True)
        step = self.two_phase.start(kind, 1)
        self.two_phase.choose(step, 0).chosen()

    def idle_step(self, kind: StepKind) -> None:
        """Runs a step that belongs to no sequence."""
        self.buffers.fill_padding(kind.batch)
        self.buffers.upload(kind.batch)
        self.start(kind, kind.batch).chosen()

    def capture_next(self) -> bool:
        """Captures a missing step with filters, or with shared keys; returns whether there was one.

        Call it while no step runs. Once memory has run out, no more are captured ahead.
        """
        while self._later and not self.shortage.has_come:
            kind = self._later.pop()
            if kind not in self._steps:
                self._steps.unless_short(kind, partial(self.idle_step, kind))
                return True
        return False

    def close(self) -> None:
        """Frees the graphs; what they captured of a library may keep it from ending."""
        self._steps.clear()
        self._forwards.clear()
        self.two_phase.close()

    def _can_share(self) -> list[tuple[int, int]]:
        """Returns the shapes of steps that can read shared keys only once."""
        return [shape for shape in self.shapes.all() if self._step.block_sizes(*shape).count]

    def _try(self, kind: StepKind) -> None:
        with self._step.without_repeats():
            self._compute(kind)

    def _compute(self, kind: StepKind) -> ModelOutput:
        forward = self._step.forward(kind)
        self._step.choose(kind, forward)
        return without_logits(forward.output)


def _run(captured: _Graph | None, compute: Callable[[], ModelOutput]) -> ModelOutput:
    """Replays a graph and returns its output; computes it where there is no graph."""
    if captured is None:
        return compute()
    graph, output = captured
    graph.replay()
    return output
