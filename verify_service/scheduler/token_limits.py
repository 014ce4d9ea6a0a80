"""Tokens that a request forbids: all but `allowed_token_ids`, and any that completes one of
`bad_words`.

Tokens that are always forbidden get a bias of minus infinity. Tokens that are forbidden depending
on earlier ones get a mask, which the host makes like a grammar's. Only the output may hold no bad
word; prompts do not count.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foredraft.trees.draft_tree import DraftTree
from foredraft.types import SamplingParams

WORD_BITS = 32


def is_biased(params: SamplingParams) -> bool:
    """Returns whether a request has `biases`."""
    is_forbidding = params.allowed_token_ids or any(len(word) == 1 for word in params.bad_words)
    return bool(params.logit_bias or is_forbidding)


def biases(params: SamplingParams, vocab_size: int) -> npt.NDArray[np.float32]:
    """Returns the biases of a request's logits, float32 [V]; minus infinity forbids a token."""
    made = np.zeros(vocab_size, np.float32)
    for token, bias in params.logit_bias.items():
        if 0 <= token < vocab_size:
            made[token] = bias
    if params.allowed_token_ids:
        is_forbidden = np.ones(vocab_size, bool)
        is_forbidden[list(params.allowed_token_ids)] = False
        made[is_forbidden] = -math.inf
    made[[word[0] for word in params.bad_words if len(word) == 1]] = -math.inf
    return made


class TokenLimits:
    """Makes masks of the tokens that one request forbids. They depend on the output alone.

    Args:
        params: The request's parameters; only `bad_words` and `allowed_token_ids` are read.
        vocab_size: Number of columns of the logits.

    Attributes:
        need_history: Whether forbidden tokens depend on earlier ones.
        num_before: Number of newest tokens that they depend on.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self._always = biases(params, vocab_size) == -math.inf
        bits = np.packbits(~self._always, bitorder="little")
        bits.resize(-(-vocab_size // WORD_BITS) * WORD_BITS // 8)
        self._allowed = bits.view(np.int32)
        self._after: dict[tuple[int, ...], list[int]] = {}
        for word in params.bad_words:
            if len(word) > 1:
                self._after.setdefault(word[:-1], []).append(word[-1])
        self._lengths = sorted({len(before) for before in self._after})
        self.need_history = bool(self._after)
        self.num_before = self._lengths[-1] if self._lengths else 0

    def fill(self, output: Sequence[int], tree: DraftTree, masks: npt.NDArray[np.int32]) -> None:
        """Removes forbidden tokens from masks.

        Args:
            output: Tokens so far, the newest last; the last `num_before` are enough.
            tree: The draft tree; nodes without an earlier parent are skipped.
            masks: int32 [1 + nodes, words]; bit v % 32 of word v // 32 is token v.
        """
        masks &= self._allowed
        if not self.need_history:
            return
        longest = self.num_before
        histories = [tuple(output[-longest:])]
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            above = histories[parent + 1] if -1 <= parent < node else ()
            histories.append((*above, token)[-longest:])
        words = masks.view(np.uint32)
        for row, history in enumerate(histories):
            for token in self._forbidden_after(history):
                words[row, token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)

    def num_kept(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """Returns how many of the tokens chosen after an output are allowed, up to the first
        forbidden one.
        """
        history = list(output[-self.num_before :])
        for i, token in enumerate(tokens):
            if self._always[token] or token in self._forbidden_after(tuple(history)):
                return i
            history.append(token)
        return len(tokens)

    def _forbidden_after(self, history: tuple[int, ...]) -> list[int]:
        found: list[int] = []
        for length in self._lengths:
            if length <= len(history):
                found += self._after.get(history[-length:], ())
        return found
