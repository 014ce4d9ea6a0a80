"""The order of work in a step of a draft that keeps KV on the verifier's page numbers.

A `DraftMethod` computes; it is all that differs from algorithm to algorithm.
"""

import math
import time
from collections.abc import Callable

import torch

from draft_service.drafters.base import Proposer
from draft_service.drafters.graph_drafting import GraphDrafting, GraphSettings, wait
from draft_service.drafters.hidden_source import HiddenSource
from draft_service.drafters.method import DraftMethod, ordering_of
from draft_service.drafters.ngram_override import NgramOverride
from draft_service.drafters.paged_sequences import PagedSequences
from draft_service.drafters.step_shape import draft_shape, handed_on
from draft_service.drafters.tree_limits import TreeLimits
from draft_service.steps.draft_step import StepOptions
from draft_service.steps.graphs import DraftGraphs
from foredraft.api.draft.v1 import draft_pb2
from foredraft.cpu.threads import FEW_ROWS
from foredraft.errors import AttachRefused, InvalidRequest
from foredraft.runner.aside import ran_out

# Steps on a CPU are brief up to this time, which a health check may wait. Two thread switches take
# 0.25 ms of the 3 to 4 ms of a small head's step.
BRIEF_SECONDS = 0.02


class PagedProposer(Proposer):
    """Runs the steps of one verifier: extends by what was committed, then drafts.

    Args:
        method: Computes the steps.
        attach: The verifier's sizes.
        limits: Limits of trees.
        graphs: Settings of steps of fixed shape; None where steps have none.

    Attributes:
        override: N-grams that replace the model's proposals; None for no n-grams.
        on_close: Called by `close`, when nothing computes with the model any more.
    """

    override: NgramOverride | None = None
    on_close: Callable[[], None] | None = None

    def __init__(
        self,
        method: DraftMethod,
        attach: draft_pb2.AttachRequest,
        limits: TreeLimits,
        graphs: GraphSettings | None = None,
    ) -> None:
        self._method, self._device = method, method.sizes.device
        self._attach, self._limits, self._settings = attach, limits, graphs
        # Runs steps of fixed shape; None where a draft has none, and on a CPU.
        self._fixed_steps: GraphDrafting | None = None
        self._sequences = PagedSequences(attach, limits, method.sizes.shift)
        self._few_rows_took = math.inf  # seconds of the newest step that read few tokens

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures the graphs of steps, and compiles the kernels of long extensions."""
        try:
            self._fixed_steps = self._make_fixed_steps()
            if self._device.type == "cuda":
                self._method.warm_up()
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
        tree_requests = self._method.extend(extensions, self.hidden)
        extended = time.perf_counter_ns()
        if fixed is not None:
            fixed.draft(tree_requests, response)
        else:
            trees = self._method.draft(tree_requests)
            for tree_request, tree in zip(tree_requests, trees, strict=True):
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
        """Frees the graphs, the n-grams and the KV."""
        if self.override is not None:
            self.override.close()
        if self._fixed_steps is not None:
            self._fixed_steps.close()
            self._fixed_steps = None
        if self.on_close is not None:
            self.on_close()
        del self._method

    def _make_fixed_steps(self) -> GraphDrafting | None:
        """Creates the steps of fixed shape, captured where the settings say so; None for a draft
        without them.
        """
        settings, method, reader = self._settings, self._method, self.hidden
        sizes = method.sizes
        if settings is None or (sizes.row_width and reader is None):
            return None
        shape = draft_shape(self._attach, self._limits, sizes)
        options = StepOptions(
            shape,
            ordering_of(self._attach),
            settings.max_batch(self._attach),
            handed_on(self.exchange, shape),
        )
        source = None
        if reader is not None and sizes.row_width:
            num_rows = options.max_batch * shape.num_rows
            source = HiddenSource(reader, num_rows, sizes.row_width, sizes.dtype, sizes.device)
        graphs = DraftGraphs(method.fixed_step(options, source))
        if settings.captures:
            graphs.capture(sampled=True)
        return GraphDrafting(graphs, source, reader, self.exchange)

    def _wait_for_rows(self) -> None:
        """Waits, on a GPU, until hidden states have arrived or have been read.

        The answer to the step lets the verifier overwrite them.
        """
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            wait(event.query, self.hidden)


def _has_few_rows(request: draft_pb2.StepRequest) -> bool:
    return sum(len(sequence.tokens) for sequence in request.sequences) <= FEW_ROWS
