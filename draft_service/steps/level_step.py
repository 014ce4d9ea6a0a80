"""The step of a draft that computes its levels one after another: a model, or a head of one."""

from collections.abc import Callable

import torch

from draft_service.steps.batches import DraftBatches
from draft_service.steps.draft_step import DraftStep, StepOptions
from draft_service.steps.operations import Beams
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


class Roots:
    """Holds what levels begin with: results of the sequences' newest tokens, at fixed addresses.

    Attributes:
        logits: float32 [max_batch, V].
        features: [max_batch, H]; None for a draft without features.
    """

    def __init__(self, kv: PagedKV, options: StepOptions) -> None:
        shape, size, device = options.shape, options.max_batch, kv.data.device
        self.logits = torch.zeros(size, shape.vocab, device=device)
        self.features: torch.Tensor | None = None
        if shape.feature_size:
            self.features = torch.zeros(
                size, shape.feature_size, dtype=kv.data.dtype, device=device
            )

    def keep(self, logits: torch.Tensor | None, features: torch.Tensor | None) -> None:
        """Copies logits [n, V] and features [n, H], as far as there are some."""
        if logits is not None:
            self.logits[: len(logits)].copy_(logits)
        if self.features is not None and features is not None:
            self.features[: len(features)].copy_(features)


class LevelStep(DraftStep):
    """Steps of a draft whose levels are a forward each.

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
    ) -> None:
        super().__init__(kv, options, token_map)
        self._forward, self._features = forward, features
        self._roots = Roots(kv, options)

    def extend(self, batch: int) -> None:
        """See DraftStep."""
        batches = self.prepare(batch)
        features = self._features(batches.plan.hidden_rows) if self._features is not None else None
        self._roots.keep(*self._forward(batches.committed(), features, None))

    def take_roots(
        self, batch: int, logits: torch.Tensor | None, features: torch.Tensor | None
    ) -> None:
        """See DraftStep."""
        self.prepare(batch)
        self._roots.keep(logits, features)

    def grow(self, batch: int, batches: DraftBatches, beams: Beams) -> None:
        """See DraftStep."""
        logits, features = self._roots.logits[:batch], self._roots.features
        if features is not None:
            features = features[:batch]
        for level in range(self.shape.num_steps):
            tokens, sources = beams.grow(logits, self._token_map)
            if level + 1 == self.shape.num_steps:
                break
            mask = beams.seen() if self.shape.topk > 1 else None
            logits, features = self._forward(batches.level(level, tokens, mask), features, sources)
