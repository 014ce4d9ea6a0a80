"""Base class of proposers that keep KV on the verifier's page numbers: the order of work in a
step.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch

from draft_service.drafters.base import Proposer
from draft_service.drafters.beam_drafting import TreeRequest
from draft_service.drafters.graph_drafting import GraphDrafting, GraphSettings, wait
from draft_service.drafters.hidden_source import HiddenSource
from draft_service.drafters.ngram_override import NgramOverride
from draft_service.drafters.paged_sequences import Extension, PagedSequences
from draft_service.drafters.step_shape import draft_shape, handed_on
from draft_service.steps.draft_step import DraftStep, StepOptions
from draft_service.steps.graphs import DraftGraphs
from foredraft.api.draft.v1 import draft_pb2
from foredraft.cpu.threads import FEW_ROWS
from foredraft.errors import AttachRefused, InvalidRequest
from foredraft.models.config import ModelConfig
from foredraft.runner.aside import ran_out
from foredraft.trees.draft_tree import DraftTree
from foredraft.trees.tree_building import Ordering

# Maximum rows of one forward of long extensions, over all sequences: enough to use the device well,
# few enough to fit in memory.
CHUNK_ROWS, GPU_CHUNK_ROWS = 512, 1024
# Steps on a CPU are brief up to this time, which a health check may wait. Two thread switches take
# 0.25 ms of the 3 to 4 ms of a small head's step.
BRIEF_SECONDS = 0.02

Limits = tuple[int, int, int]  # (steps, topk, nodes) of a tree; nodes are without the root


class PagedProposer(Proposer):
    """Base class of proposers with KV: runs the steps of one verifier.

    Args:
        config: Configuration of the model, or of a head's layers.
        attach: The verifier's sizes.
        limits: (steps, topk, nodes) of the largest tree.
        device: Device that the model runs on.
        shift: See `PagedSequences`.

    Attributes:
        override: N-grams that replace the model's proposals; None for no n-grams.
        on_close: Called by `close`, when nothing computes with the model any more.
    """

    override: NgramOverride | None = None
    on_close: Callable[[], None] | None = None

    def __init__(
        self,
        config: ModelConfig,
        attach: draft_pb2.AttachRequest,
        limits: Limits,
        device: torch.device,
        shift: int = 0,
    ) -> None:
        self._config, self._shift = config, shift
        self._attach, self._limits, self._device = attach, limits, device
        self._most_rows = CHUNK_ROWS if device.type == "cpu" else GPU_CHUNK_ROWS
        # Runs steps of fixed shape; None where a draft has none, and on a CPU.
        self._fixed_steps: GraphDrafting | None = None
        self._sequences = PagedSequences(attach, limits, shift)
        self._few_rows_took = math.inf  # seconds of the newest step that read few tokens
        self._ordering: Ordering = "coupled" if attach.draft_sampling == "coupled" else "topk"

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures the graphs of steps, and compiles the kernels of long extensions."""
        try:
            self._fixed_steps = self._make_fixed_steps()
            if self._device.type == "cuda":
                self._warm_up()
        except RuntimeError as error:
            if not ran_out(error):
                raise
            raise AttachRefused(
                "max_batch",
                f"no memory for the draft's steps; lower --cuda-graph-max-bs: {error}",
            ) from error
        if self._fixed_steps is not None:
            self._sequences.on_pages = self._fixed_steps.graphs.set_pages

    def is_brief(self, request: draft_pb2.StepRequest) -> bool:
        """Returns whether two thread switches would take much of the step's time, and others need
        not wait long for it.
        """
        if self._fixed_steps is not None:
            return self._fixed_steps.is_brief(request)
        on_cpu = self._device.type == "cpu"
        return on_cpu and _has_few_rows(request) and self._few_rows_took < BRIEF_SECONDS

    @torch.inference_mode()
    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        """Computes the KV of the committed tokens, then drafts."""
        started, fixed = time.perf_counter_ns(), self._fixed_steps
        if request.sequences and request.sequences[0].HasField("device_row"):
            if fixed is None or not fixed.can_continue:
                raise InvalidRequest("device_row", "this attach has no exchange on a GPU")
            fixed.proceed(request.step, self._sequences.proceed(request))
            return draft_pb2.StepResponse()
        extensions = self._sequences.apply(request)
        if fixed is not None and extensions:
            fixed.settle()
        if self.hidden is not None and extensions:
            self.hidden.expect(request.step)
        response = draft_pb2.StepResponse()
        if self.override is not None:
            self.override.read(request)
            self.override.propose(extensions, response)
        if fixed is not None and fixed.fits(extensions):
            fixed.step(extensions, response)
            response.draft_microseconds = (time.perf_counter_ns() - started) // 1000
            return response
        self._wait_for_rows()
        tree_requests = self._extend(extensions)
        extended = time.perf_counter_ns()
        if fixed is not None:
            fixed.draft(tree_requests, response)
        else:
            for tree_request, tree in zip(tree_requests, self._draft(tree_requests), strict=True):
                if tree.tokens:
                    response.proposals.add(
                        slot=tree_request.sequence.slot, tokens=tree.tokens, parents=tree.parents
                    )
        self._wait_for_rows()
        response.extend_microseconds = (extended - started) // 1000
        ended = time.perf_counter_ns()
        response.draft_microseconds = (ended - extended) // 1000
        if _has_few_rows(request):
            self._few_rows_took = (ended - started) * 1e-9
        return response

    def close(self) -> None:
        """Frees the graphs and the n-grams; the KV goes with the proposer."""
        if self.override is not None:
            self.override.close()
        if self._fixed_steps is not None:
            self._fixed_steps.close()
            self._fixed_steps = None
        if self.on_close is not None:
            self.on_close()

    def _make_fixed_steps(self) -> GraphDrafting | None:
        """Creates the fixed-shape steps; None for a draft without them."""
        return None

    def _step_options(
        self, settings: GraphSettings, vocab: int, feature_size: int = 0
    ) -> StepOptions:
        """Returns the options of fixed-shape steps.

        Args:
            settings: Settings of the draft's process.
            vocab: Number of columns of the draft's logits.
            feature_size: Number of elements of a head's features; 0 for drafts without features.
        """
        windows = self._config.windows
        shape = draft_shape(self._attach, self._limits, vocab, feature_size, windows, self._shift)
        max_batch = settings.max_batch(self._attach)
        return StepOptions(shape, self._ordering, max_batch, handed_on(self.exchange, shape))

    def _graph_drafting(
        self, step: DraftStep, settings: GraphSettings, source: HiddenSource | None = None
    ) -> GraphDrafting:
        """Returns the runner of a step of fixed shape, captured where the settings say so."""
        graphs = DraftGraphs(step)
        if settings.captures:
            graphs.capture(sampled=True)
        return GraphDrafting(graphs, source, self.hidden, self.exchange)

    def _wait_for_rows(self) -> None:
        """Waits, on a GPU, until hidden states have arrived or have been read.

        The answer to the step lets the verifier overwrite them.
        """
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            wait(event.query, self.hidden)

    @abstractmethod
    def _extend(self, extensions: Sequence[Extension]) -> list[TreeRequest]:
        """Computes the KV of committed tokens, in order; returns the trees that are wanted."""

    @abstractmethod
    def _draft(self, requests: Sequence[TreeRequest]) -> list[DraftTree]:
        """Returns a tree for each request, in their order."""

    def _warm_up(self) -> None:
        """Compiles the kernels that run outside of the graphs."""


def _has_few_rows(request: draft_pb2.StepRequest) -> bool:
    return sum(len(sequence.tokens) for sequence in request.sequences) <= FEW_ROWS
