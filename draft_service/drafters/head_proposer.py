"""Draft trees from one head module that is applied to its own output."""

from collections.abc import Callable, Sequence

import torch

from draft_service.drafters.beam_drafting import Scratch
from draft_service.drafters.graph_drafting import GraphDrafting, GraphSettings
from draft_service.drafters.hidden_source import HiddenSource
from draft_service.drafters.paged import Limits, PagedProposer
from draft_service.drafters.paged_sequences import Extension
from draft_service.drafters.step_shape import draft_shape, handed_on
from draft_service.steps.graphs import DraftGraphs
from draft_service.steps.head_runner import HeadRunner
from foredraft.api.draft.v1 import draft_pb2
from foredraft.attention.base import Batch
from foredraft.errors import InvalidRequest
from foredraft.runner.batch import SequenceRows


class HeadLevels:
    """A head's levels: each reads the features of the one before."""

    def __init__(self, runner: HeadRunner) -> None:
        self._runner, self.kv = runner, runner.kv
        self.token_map = runner.head.token_map

    def run(
        self, rows: Sequence[SequenceRows], features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See LevelRunner."""
        assert features is not None
        output = self._runner.forward(rows, features)
        return output.logits, output.features


class HeadProposer(PagedProposer):
    """Drafts for one verifier.

    Attributes:
        on_close: Called when nothing computes with the head any more.
    """

    on_close: Callable[[], None] | None = None

    def __init__(
        self,
        runner: HeadRunner,
        attach: draft_pb2.AttachRequest,
        limits: Limits,
        scratch: Scratch,
        graphs: GraphSettings | None = None,
    ) -> None:
        head = runner.head
        levels, config = HeadLevels(runner), head.config.layer
        super().__init__(levels, config, attach, limits, scratch, head.device, shift=1)
        self._head_runner = runner
        self._settings = graphs

    def close(self) -> None:
        """See PagedProposer."""
        super().close()
        del self._head_runner
        if self.on_close is not None:
            self.on_close()

    def _make_fast(self) -> GraphDrafting | None:
        settings, reader = self._settings, self.hidden
        if settings is None or reader is None:
            return None
        runner, head = self._head_runner, self._head_runner.head
        shape = draft_shape(
            self._attach,
            self._limits,
            head.lm_head.weight.shape[0],
            head.config.layer.hidden_size,
            head.config.layer.windows,
            shift=1,
        )
        source = HiddenSource(
            reader,
            settings.max_batch(self._attach) * shape.num_rows,
            head.hidden_width,
            head.dtype,
            head.device,
        )

        def forward(
            batch: Batch, features: torch.Tensor | None, sources: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            assert features is not None
            output = head.forward(batch, features, runner.kv, runner.attention, sources=sources)
            return output.logits, output.features

        graphs = DraftGraphs(
            forward,
            runner.kv,
            shape,
            ordering=self._ordering,
            token_map=head.token_map,
            features=lambda places: head.fuse(source.rows.index_select(0, places)),
            max_batch=settings.max_batch(self._attach),
            handed_on=handed_on(self.exchange, shape),
        )
        if settings.captures:
            graphs.capture(sampled=True)
        return GraphDrafting(graphs, source, reader, self.exchange)

    def _states(self, extension: Extension) -> torch.Tensor:
        """The target's hidden states of the positions before the tokens'."""
        slot, wanted = extension.sequence.slot, len(extension.tokens)
        hidden = extension.hidden
        if hidden is None or self.hidden is None:
            raise InvalidRequest("hidden", f"slot {slot}: there is none for {wanted} tokens")
        if hidden.num_rows != wanted:
            raise InvalidRequest(
                "hidden", f"slot {slot}: {hidden.num_rows} rows for {wanted} tokens"
            )
        return self.hidden.read(hidden).to(self._head_runner.head.device)

    def _fuse(self, states: torch.Tensor) -> torch.Tensor:
        """See PagedProposer."""
        return self._head_runner.fuse(states)

    def _blank_features(self, num_rows: int) -> torch.Tensor:
        """See PagedProposer."""
        head = self._head_runner.head
        states = torch.zeros(num_rows, head.hidden_width, dtype=head.dtype, device=head.device)
        return self._fuse(states)
