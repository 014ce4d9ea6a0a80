"""Decode steps as CUDA graphs: trees in, the target's forward, sampling, walk and commit, tokens
out.

Every step has a fixed shape: B sequences of R rows, padded, with one graph for each pair (B, R).
Lengths, pages and trees are read from device memory, so a step needs one upload, one launch and
one download. A step may start before the host knows the outcome of the previous one.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from foredraft.models.decoder import ModelOutput
from foredraft.runner.aside import ran_out
from verify_service.executor.captured.buffers import RunningStep
from verify_service.executor.captured.capturing import Capturing, without_logits
from verify_service.executor.captured.listener import StepListener
from verify_service.executor.captured.shapes import PaddedShapes
from verify_service.executor.captured.step import DecodeStep, StepKind
from verify_service.executor.captured.step_buffers import StepBuffers
from verify_service.executor.captured.two_phase_graphs import TwoPhaseGraphs

logger = logging.getLogger(__name__)


class DecodeGraphs:
    """Captures and replays decode steps of one model over one cache.

    Args:
        step: The computation that is captured.
        listener: Hears of every step; None for nobody.
        capturing: Captures the graphs; by default as CUDA does.

    Attributes:
        shapes: Shapes that have a graph.
        buffers: Buffers of all steps, two-phase ones too; filled in before a step starts.
        two_phase: The steps whose requests ask for more than the sampling rule.
        capture: Layers whose input was captured at warm-up.
        trees: int32 [max_batch, 2, max_rows - 1]: proposals of a draft on the device, for records
            that refer to them.
        accepted, accepted_index: Outcome of the newest step for a draft; see `steps.Ended`.
        pool: Memory of the graphs; shared with other graphs that never run at the same time.
    """

    def __init__(
        self,
        step: DecodeStep,
        listener: StepListener | None = None,
        capturing: Capturing | None = None,
    ) -> None:
        self._step, self._listener = step, listener
        self.shapes = PaddedShapes(step.max_batch, step.max_rows)
        self.buffers = StepBuffers(
            step, self.shapes, on_pages=None if listener is None else listener.pages
        )
        self._capturing = capturing or Capturing(step)
        self.two_phase = TwoPhaseGraphs(step, self.shapes, self.buffers, self._capturing, listener)
        self.capture: tuple[int, ...] = ()
        self.trees = step.trees
        self.accepted, self.accepted_index = step.accepted, step.accepted_index
        self.pool = self._capturing.pool
        self._steps: dict[StepKind, tuple[torch.cuda.CUDAGraph, ModelOutput]] = {}
        self._later: list[StepKind] = []  # steps to capture while the engine idles, the last first
        # Steps without a graph, since there was no memory for it; they run operation by operation.
        self._op_by_op: set[StepKind] = set()
        self._is_warm = False  # whether the start's graphs are there
        self._forwards: dict[StepKind, tuple[torch.cuda.CUDAGraph, ModelOutput]] = {}

    def prepare(
        self,
        num_sequences: int,
        num_rows: int,
        capture: Sequence[int],
        is_filtered: bool = False,
        shares_keys: bool = False,
    ) -> StepKind:
        """Captures the graph of `start` from the records that are filled in, unless it exists.

        Call it before the stream waits for a draft: capturing waits for the stream, so nothing
        could end that wait.
        """
        kind = self._kind(num_sequences, num_rows, capture, is_filtered, shares_keys)
        if not self._is_known(kind):
            if self._listener is not None:
                self._listener.prepare(kind, num_sequences, self.buffers)
            self.buffers.upload(num_sequences)
            self._unless_short(kind, partial(self._capture, kind))
        return kind

    def start(
        self,
        num_sequences: int,
        num_rows: int,
        capture: Sequence[int],
        is_filtered: bool = False,
        shares_keys: bool = False,
    ) -> RunningStep:
        """Starts a whole step on the records that were sent.

        At most one step that was started before may be running.

        Args:
            is_filtered: Whether the step applies top-k, top-p and min-p of the records.
            shares_keys: Whether the step reads shared keys once, as the records say.
        """
        kind = self.prepare(num_sequences, num_rows, capture, is_filtered, shares_keys)
        if self._listener is not None:
            self._listener.step(kind, num_sequences, self.buffers)
        if kind in self._op_by_op:
            output = self._compute(kind)
        else:
            graph, output = self._steps[kind]
            graph.replay()
        return self.buffers.download(kind, num_sequences, output)

    def forward(self, num_sequences: int, num_rows: int, capture: Sequence[int]) -> ModelOutput:
        """Runs the target alone, for batches whose tokens the sampler chooses.

        Returns:
            Logits and hidden states of all B x R rows, padding included; valid until the next step.
        """
        kind = self._kind(num_sequences, num_rows, capture)
        if self._listener is not None:
            self._listener.forward(kind, num_sequences, self.buffers)
        if kind not in self._forwards:
            graph, forward = self._capturing.record(lambda: self._step.forward(kind))
            self._forwards[kind] = graph, forward.output
        graph, output = self._forwards[kind]
        graph.replay()
        return output

    def runs(self, capture: Sequence[int]) -> list[Callable[[], object]]:
        """Returns what `warm_up` captures, as functions that `compile_ahead` takes."""
        kinds = [
            StepKind(batch, rows, tuple(capture), is_filtered)
            for batch, rows in self.shapes.all()
            for is_filtered in (True, False)
        ]
        kinds.append(StepKind(1, 1, tuple(capture), True, True))
        kinds += [self._kind(*shape, capture, shares_keys=True) for shape in self._can_share()]
        return [partial(self._try, kind) for kind in kinds]

    def warm_up(self, capture: Sequence[int]) -> None:
        """Captures every shape, largest first, so that the others fit its memory; with filters only
        that one, see `capture_next`, and none that reads shared keys once.
        """
        self.capture = tuple(capture)
        largest, *others = self.shapes.all()
        self.idle_step(*largest, is_filtered=True)
        for shape in (largest, *others):
            self.idle_step(*shape)
        self._later = [
            self._kind(*shape, capture, is_filtered, shares_keys=True)
            for is_filtered in (True, False)
            for shape in self._can_share()
        ]
        self._later += [self._kind(*shape, capture, is_filtered=True) for shape in others]
        # Others are captured when they are needed; their kernels are ready then.
        self.buffers.fill_padding(1)
        self.buffers.upload(1)
        step = self.two_phase.start(1, 1, self.capture, False)
        self.two_phase.choose(step, 0).chosen()
        self._is_warm = True

    def idle_step(
        self, batch: int, rows: int, is_filtered: bool = False, shares_keys: bool = False
    ) -> None:
        """Runs a step that belongs to no sequence."""
        self.buffers.fill_padding(batch)
        self.buffers.upload(batch)
        self.start(batch, rows, self.capture, is_filtered, shares_keys).chosen()

    def capture_next(self) -> bool:
        """Captures a missing step with filters, or with shared keys; returns whether there was one.

        Call it while no step runs. Once memory has run out, no more are captured ahead.
        """
        while self._later:
            kind = self._later.pop()
            if not self._is_known(kind):
                flags = kind.is_filtered, kind.shares_keys
                self._unless_short(kind, partial(self.idle_step, kind.batch, kind.rows, *flags))
                return True
        return False

    def _is_known(self, kind: StepKind) -> bool:
        """Returns whether a step was captured, or could not be."""
        return kind in self._steps or kind in self._op_by_op

    def _capture(self, kind: StepKind) -> None:
        self._steps[kind] = self._capturing.record(lambda: self._compute(kind))

    def _unless_short(self, kind: StepKind, run: Callable[[], None]) -> None:
        """Runs a function that captures a step. If memory runs out in it, steps of this kind run
        operation by operation from now on, and none are captured ahead any more.

        At the start the error is raised, since other flags would help.
        """
        try:
            run()
            return
        except RuntimeError as error:
            # Other ranks capture the step too, and would wait for this one.
            if not self._is_warm or self._listener is not None or not ran_out(error):
                raise
            if not self._op_by_op:
                reason = str(error).strip().split("\n")[0]
                logger.warning("no memory for more CUDA graphs; steps run without: %s", reason)
        # Here nothing refers any more to the error, and so to what the capture had allocated.
        self._op_by_op.add(kind)
        self._later.clear()
        self._steps.pop(kind, None)
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Frees the graphs; what they captured of a library may keep it from ending."""
        self._steps.clear()
        self._forwards.clear()
        self.two_phase.close()

    def _kind(
        self,
        num_sequences: int,
        num_rows: int,
        capture: Sequence[int],
        is_filtered: bool = False,
        shares_keys: bool = False,
    ) -> StepKind:
        batch = self.shapes.batch_size(num_sequences)
        return StepKind(batch, num_rows, tuple(capture), is_filtered, shares_keys=shares_keys)

    def _can_share(self) -> list[tuple[int, int]]:
        """Returns the shapes of steps that can read shared keys once."""
        return [shape for shape in self.shapes.all() if self._step.block_sizes(*shape).count]

    def _try(self, kind: StepKind) -> None:
        with self._step.without_repeats():
            self._compute(kind)

    def _compute(self, kind: StepKind) -> ModelOutput:
        forward = self._step.forward(kind)
        self._step.choose(kind, forward)
        return without_logits(forward.output)
