"""What the configuration says of a draft: `DraftSettings`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Settings of a draft from the configuration.

    Attributes:
        vocab_size: Number of the target's tokens.
        tree_shape: (steps, topk) of the largest tree.
        scope: "request", "key" or "server": requests that share text for drafting.
        refill_tokens: Maximum number of tokens per step that a draft with KV catches up on, and of
            cached tokens that are computed again to fill pages that it has lost.
        number: Number of the draft, where there are several.
    """

    vocab_size: int
    tree_shape: tuple[int, int]
    scope: str
    refill_tokens: int
    number: int = 0
