"""The step of a draft that computes its levels one after another: a model, or a head of one."""

from collections.abc import Callable

import torch

from draft_service.steps.batches import DraftBatches
from draft_service.steps.draft_step import DraftStep, StepOptions
from draft_service.steps.operations import Beams
from draft_service.steps.records import DraftShape
from foredraft.attention.base import Batch
from foredraft.kvcache.paged_kv import PagedKV

# Forward of a draft. Inputs: the batch, features, and the index of the features that each row
# continues (None: one after another). Outputs: logits of the batch's requested rows, their
# features.
Forward = Callable[
    [Batch, torch.Tensor | None, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]
]
# Returns features [n, feature_size] for row indexes, int64 [n], in the source of hidden states.
Features = Callable[[torch.Tensor], torch.Tensor]


class RootedStep(DraftStep):
    """Steps that begin with a forward of the committed tokens, whose results the trees' roots are.

    Args:
        forward: The draft; its attention takes a batch's own plan.
        features: Features of committed tokens; None for a model that reads none.

    See DraftStep for the other arguments.
    """

    def __init__(
        self,
        forward: Forward,
        features: Features | None,
        kv: PagedKV,
        options: StepOptions,
        token_map: torch.Tensor | None,
        planned: DraftShape | None = None,
    ) -> None:
        super().__init__(kv, options, token_map, planned)
        self._forward, self._features = forward, features
        # Results of the sequences' newest tokens, at fixed addresses: logits [max_batch, V], and
        # features [max_batch, H] of a draft that has some.
        shape, size = options.shape, options.max_batch
        self._root_logits = torch.zeros(size, shape.vocab, device=self.device)
        self._root_features: torch.Tensor | None = None
        if shape.feature_size:
            self._root_features = torch.zeros(
                size, shape.feature_size, dtype=kv.data.dtype, device=self.device
            )

    def extend(self, batch: int) -> None:
        """See DraftStep."""
        batches = self.prepare(batch)
        features = self._features(batches.plan.hidden_rows) if self._features is not None else None
        self._keep(*self._forward(batches.committed(), features, None))

    def take_roots(
        self, batch: int, logits: torch.Tensor | None, features: torch.Tensor | None
    ) -> None:
        """See DraftStep."""
        self.prepare(batch)
        self._keep(logits, features)

    def _keep(self, logits: torch.Tensor | None, features: torch.Tensor | None) -> None:
        """Copies logits [n, V] and features [n, H] of roots, as far as there are some."""
        if logits is not None:
            self._root_logits[: len(logits)].copy_(logits)
        if self._root_features is not None and features is not None:
            self._root_features[: len(features)].copy_(features)


class LevelStep(RootedStep):
    """Steps of a draft whose levels are a forward each."""

    def grow(self, batch: int, batches: DraftBatches, beams: Beams) -> None:
        """See DraftStep."""
        logits, features = self._root_logits[:batch], self._root_features
        if features is not None:
            features = features[:batch]
        for level in range(self.shape.num_steps):
            tokens, sources = beams.grow(logits, self._token_map)
            if level + 1 == self.shape.num_steps:
                break
            mask = beams.seen() if self.shape.topk > 1 else None
            logits, features = self._forward(batches.level(level, tokens, mask), features, sources)
