"""The training loop that drafters share which propose one block behind each anchor."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from training.draft.acceptance import Acceptance, summarize, walk
from training.draft.trainer import DraftTrainer

ROWS_AT_ONCE, ANCHORS_AT_ONCE = 64, 32


class AnchorTrainer(DraftTrainer):
    """Trains a drafter on blocks behind random anchors of a window.

    Attributes:
        first_anchor: First slot of a window that a block may follow.
    """

    has_trees = False
    first_anchor: int

    @property
    def num_depths(self) -> int:
        """Number of tokens in a block; see DraftTrainer."""
        return self.config.block

    def _mask_token(self) -> int:
        """Returns the token that stands for tokens to be drafted, by default the rarest."""
        if self.config.mask_token is not None:
            return self.config.mask_token
        counts = torch.bincount(self.windows.flatten(), minlength=self.target.shape.vocab_size)
        return int(counts.argmin())

    def _anchors(self) -> Tensor:
        """Draws random positions of this step's blocks, ascending."""
        config = self.config
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        room = config.window - config.block - 1
        chosen = torch.randperm(room, generator=generator)[: config.anchors].sort().values
        return (self.first_anchor + chosen).to(self.device)

    @abstractmethod
    def _chain(self, tokens: Tensor, steps: int) -> Callable[[Tensor], Tensor]:
        """Returns a function of anchors, int64 [n], that says how many of the `steps` tokens behind
        each anchor match, [rows, n].

        Args:
            tokens: int64 [rows, length], held-out continuations.
        """

    def measure(self, tree: bool) -> tuple[dict[str, Acceptance], dict[str, Acceptance]]:
        """Measures accept lengths of chains on the held-out continuations; a block is no tree."""
        config = self.config
        steps = min(config.depth, config.block)
        results = {}
        for domain, texts in self.heldout.items():
            counts: list[int] = []
            for tokens in texts.split(ROWS_AT_ONCE):
                chain = self._chain(tokens, steps)
                end = tokens.shape[1] - config.block - 1
                slots = torch.arange(self.first_anchor, end, device=self.device)
                matched = [chain(anchors) for anchors in slots.split(ANCHORS_AT_ONCE)]
                for row in torch.cat(matched, 1).tolist():
                    counts += walk(row, config.eval_prompt)
            results[domain] = summarize(counts, steps)
        self._tell("chain", results)
        return results, {}
