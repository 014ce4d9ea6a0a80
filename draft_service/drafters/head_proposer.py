"""Proposes trees from a head of one module, which is applied to its own output."""

from collections.abc import Sequence

import torch

from draft_service.drafters.beam_drafting import Scratch
from draft_service.drafters.beam_proposer import BeamProposer
from draft_service.drafters.graph_drafting import GraphDrafting, GraphSettings
from draft_service.drafters.hidden_source import HiddenSource, read_states
from draft_service.drafters.paged_proposer import Limits
from draft_service.drafters.paged_sequences import Extension
from draft_service.steps.draft_step import StepOptions
from draft_service.steps.head_runner import HeadRunner
from draft_service.steps.level_step import Features, LevelStep
from foredraft.api.draft.v1 import draft_pb2
from foredraft.attention.base import Batch
from foredraft.runner.batch import SequenceRows


class HeadLevels:
    """Runs a head level by level; each level reads the features of the previous one."""

    def __init__(self, runner: HeadRunner) -> None:
        self._runner, self.kv, self.attention = runner, runner.kv, runner.attention
        self.token_map = runner.head.token_map

    def run(
        self, rows: Sequence[SequenceRows], features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See LevelRunner."""
        assert features is not None
        output = self._runner.forward(rows, features)
        return output.logits, output.features


class HeadProposer(BeamProposer):
    """Drafts for one verifier with a head."""

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

    @property
    def _row_width(self) -> int:
        """Returns the number of elements of a hidden-state row that the verifier sends."""
        head = self._head_runner.head
        return head.config.layer.hidden_size if self._attach.fused else head.hidden_width

    def close(self) -> None:
        """See PagedProposer."""
        super().close()
        del self._head_runner

    def _make_fixed_steps(self) -> GraphDrafting | None:
        settings, reader = self._settings, self.hidden
        if settings is None or reader is None:
            return None
        head, width = self._head_runner.head, self._row_width
        size = head.config.layer.hidden_size
        options = self._step_options(settings, head.lm_head.weight.shape[0], size)
        num_rows = options.max_batch * options.shape.num_rows
        source = HiddenSource(reader, num_rows, width, head.dtype, head.device)
        step = self._make_step(lambda rows: self._fuse(source.rows[rows]), options)
        return self._graph_drafting(step, settings, source)

    def _make_step(self, features: Features, options: StepOptions) -> LevelStep:
        """Creates the steps of fixed shape."""
        runner, head = self._head_runner, self._head_runner.head
        return LevelStep(self._forward, features, runner.kv, options, head.token_map)

    def _forward(
        self, batch: Batch, features: torch.Tensor | None, sources: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes one batch of a step; see `steps.level_step.Forward`."""
        runner = self._head_runner
        assert features is not None
        output = runner.head.forward(batch, features, runner.kv, runner.attention, sources=sources)
        return output.logits, output.features

    def _states(self, extension: Extension) -> torch.Tensor:
        """Returns the target's hidden states of the positions before the tokens, [n, width]."""
        return read_states(self.hidden, extension, self._device)

    def _fuse(self, states: torch.Tensor) -> torch.Tensor:
        """See BeamProposer."""
        return states if self._attach.fused else self._head_runner.fuse(states)

    def _blank_features(self, num_rows: int) -> torch.Tensor:
        """See BeamProposer."""
        head = self._head_runner.head
        states = torch.zeros(num_rows, self._row_width, dtype=head.dtype, device=head.device)
        return self._fuse(states)
