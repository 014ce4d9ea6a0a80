"""Draft trees from one head module that is applied to its own output."""

from collections.abc import Sequence

import torch

from draft_service.drafters.beam_drafting import Scratch
from draft_service.drafters.paged import Limits, PagedProposer
from draft_service.drafters.paged_sequences import Extension
from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import InvalidRequest
from foredraft.runner.batch import SequenceRows
from foredraft.runner.head_runner import HeadRunner


class HeadLevels:
    """A head's levels: each reads the features of the one before."""

    def __init__(self, runner: HeadRunner) -> None:
        self._runner = runner
        self.token_map = runner.head.token_map

    def run(
        self, rows: Sequence[SequenceRows], features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See LevelRunner."""
        assert features is not None
        output = self._runner.forward(rows, features)
        return output.logits, output.features


class HeadProposer(PagedProposer):
    """Drafts for one verifier."""

    def __init__(
        self,
        runner: HeadRunner,
        attach: draft_pb2.AttachRequest,
        limits: Limits,
        scratch: Scratch,
    ) -> None:
        super().__init__(HeadLevels(runner), attach, limits, scratch, shift=1)
        self._head_runner = runner

    def close(self) -> None:
        """See PagedProposer."""
        super().close()
        del self._head_runner

    def _features(self, extension: Extension) -> torch.Tensor:
        """The target's hidden states of the positions before the tokens', fused."""
        slot, wanted = extension.sequence.slot, len(extension.tokens)
        hidden = extension.hidden
        if hidden is None or self.hidden is None:
            raise InvalidRequest("hidden", f"slot {slot}: there is none for {wanted} tokens")
        if hidden.num_rows != wanted:
            raise InvalidRequest(
                "hidden", f"slot {slot}: {hidden.num_rows} rows for {wanted} tokens"
            )
        rows = self.hidden.read(hidden)
        return self._head_runner.fuse(rows.to(self._head_runner.head.device))
