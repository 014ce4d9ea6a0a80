"""Drafts with a head of one module, which is applied to its own output: EAGLE, EAGLE-3, MTP.

Committed tokens read the target's hidden states. A tree grows level by level, each a forward of the
newest beams on scratch pages, which read the features of the level before.
"""

from collections.abc import Sequence

import torch

from draft_service.drafters.beam_drafting import BeamDrafter, Scratch, TreeRequest
from draft_service.drafters.extending import extend, most_rows, warm_up
from draft_service.drafters.hidden_source import HiddenSource
from draft_service.drafters.method import DraftMethod, MethodSizes, ordering_of
from draft_service.drafters.paged_sequences import Extension
from draft_service.drafters.target_states import TargetStates
from draft_service.steps.draft_step import StepOptions
from draft_service.steps.head_runner import HeadRunner
from draft_service.steps.level_step import LevelStep
from foredraft.api.draft.v1 import draft_pb2
from foredraft.attention.base import Batch
from foredraft.runner.batch import SequenceRows
from foredraft.transport.base import HiddenReader
from foredraft.trees.draft_tree import DraftTree


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

    def forward(
        self, batch: Batch, features: torch.Tensor | None, sources: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes one batch of a step of fixed shape; see `steps.level_step.Forward`."""
        assert features is not None
        head = self._runner.head
        output = head.forward(batch, features, self.kv, self.attention, sources=sources)
        return output.logits, output.features


class StatesMethod(DraftMethod):
    """Base class of the methods of heads, whose committed tokens read the target's hidden states.

    Args:
        runner: Runs the head; its KV includes the scratch pages of methods that use some.
        attach: The verifier's sizes.
    """

    def __init__(self, runner: HeadRunner, attach: draft_pb2.AttachRequest) -> None:
        head = runner.head
        layer, columns = head.config.layer, head.lm_head.weight.shape[0]
        self._attach, self._ordering = attach, ordering_of(attach)
        self._levels, self._states = HeadLevels(runner), TargetStates(runner, attach.fused)
        self.sizes = MethodSizes(
            layer, head.dtype, head.device, columns, layer.hidden_size, self._states.width
        )
        self._most_rows = most_rows(head.device)

    def extend(
        self, extensions: Sequence[Extension], reader: HiddenReader | None
    ) -> list[TreeRequest]:
        """See DraftMethod."""
        features = self._states.features(reader, extensions)
        return extend(self._levels, extensions, self._most_rows, features)

    def warm_up(self) -> None:
        """See DraftMethod."""
        warm_up(self._levels, self.sizes, self._attach, self._states.blank)


class HeadMethod(StatesMethod):
    """Drafts trees for one verifier with a head of one module.

    Args:
        runner: Runs the head; its KV includes the scratch pages.
        attach: The verifier's sizes.
        scratch: Pages for the KV of drafted tokens.
    """

    def __init__(
        self, runner: HeadRunner, attach: draft_pb2.AttachRequest, scratch: Scratch
    ) -> None:
        super().__init__(runner, attach)
        self._drafter = BeamDrafter(self._levels, scratch, attach.page_size, self._ordering)

    def draft(self, requests: Sequence[TreeRequest]) -> list[DraftTree]:
        """See DraftMethod."""
        return self._drafter.draft(requests)

    def fixed_step(self, options: StepOptions, source: HiddenSource | None) -> LevelStep:
        """See DraftMethod."""
        levels, features = self._levels, self._states.at(source)
        return LevelStep(levels.forward, features, levels.kv, options, levels.token_map)
