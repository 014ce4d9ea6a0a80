"""Follows one sequence through its grammar: which drafted nodes and which next tokens it allows."""

import time
from collections.abc import Sequence

import llguidance
import numpy as np
import numpy.typing as npt

from foredraft.trees.draft_tree import EMPTY, DraftTree
from verify_service.grammar.vocabulary import NO_TOKEN

WORD_BITS = 32
# Masks of one sequence in one step; a grammar that is slow to follow gets a smaller tree.
STEP_SECONDS = 0.005
MAX_NODES = 1 << 20


class CompiledGrammar:
    """A compiled grammar, shared by the sequences that follow it.

    Args:
        template: Never advanced itself.
        vocab_size: Columns of the masks.
    """

    def __init__(self, template: llguidance.LLMatcher, vocab_size: int) -> None:
        self._template = template
        self.vocab_size = vocab_size

    def start(self) -> llguidance.LLMatcher:
        """Creates a matcher at the beginning of the text."""
        return self._template.deep_copy()

    def follow(self) -> "GrammarState":
        """Creates the state of one sequence."""
        return GrammarState(self)


class GrammarState:
    """Tracks the state of one sequence in its grammar.

    The state depends on the output alone: it can be dropped and computed again. One thread uses it
    at a time. After an error (a step exceeded its bound of work), `failure` holds the reason, and
    the state must not be used any more.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher: llguidance.LLMatcher | None = None
        self._row_seconds = 0.0  # seconds per mask of the slowest step so far
        self.failure: str | None = None

    @property
    def num_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-self._grammar.vocab_size // WORD_BITS)

    def release(self) -> None:
        """Frees the memory; `resume` computes the state again."""
        self._matcher = None

    @property
    def is_current(self) -> bool:
        """Whether the state is at the end of the output, as from `resume` to `release`."""
        return self._matcher is not None

    def resume(self, output: Sequence[int]) -> None:
        """Moves the state to the end of `output`, unless it is there."""
        if self._matcher is None:
            self._matcher = self._grammar.start()
            self._consume(self._matcher, list(output))

    def advance(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Moves the state over chosen tokens.

        Returns:
            How many belong to the text, and whether it ends with the last of them.
        """
        matcher = self._current()
        for i, token in enumerate(tokens):
            if not self._consume(matcher, [token]):
                return i, False
            if matcher.is_stopped():
                return i + 1, True
        return len(tokens), False

    @property
    def max_nodes(self) -> int:
        """Maximum number of tree nodes whose masks can be made in time."""
        if self._row_seconds == 0:
            return MAX_NODES
        return max(0, int(STEP_SECONDS / self._row_seconds) - 1)

    def prune(self, tree: DraftTree) -> DraftTree:
        """The nodes that the grammar allows; those behind a forbidden one, or behind the text's
        end, go with it.
        """
        if not tree or self.failure is not None:
            return EMPTY
        tree = tree.first(self.max_nodes)
        matcher, below = self._current(), _children(tree)
        kept = [False] * len(tree)

        def visit(row: int) -> None:
            for node in below[row]:
                if matcher.try_consume_tokens([tree.tokens[node]]) == 1:
                    kept[node] = True
                    if not matcher.is_stopped():
                        visit(node + 1)
                    matcher.rollback(1)

        visit(0)
        self._check(matcher)
        return _selected(tree, kept)

    def fill(self, tree: DraftTree, masks: npt.NDArray[np.int32]) -> None:
        """Writes which tokens may follow the newest token and each node of a tree.

        Args:
            tree: Nodes that the grammar does not allow, and those that hang from no earlier one,
                are passed over.
            masks: int32 [1 + nodes, num_words], C-contiguous; bit v % 32 of word v // 32 is token
                v. Rows at which the text has ended, and all rows after an error, allow everything:
                nothing is taken from them.
        """
        masks.fill(-1)
        if self.failure is not None:
            return
        matcher, below = self._current(), _children(tree)
        size = masks.shape[1] * masks.itemsize
        started = time.thread_time()  # others may run meanwhile

        def make(row: int) -> None:
            matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, size)

        def visit(row: int) -> None:
            is_made = False
            for node in below[row]:
                if matcher.try_consume_tokens([tree.tokens[node]]) != 1:
                    continue
                is_visited = not matcher.is_stopped()
                if is_visited:
                    visit(node + 1)
                matcher.rollback(1)
                if is_visited:
                    # The matcher keeps the mask that it made last, and `rollback` does not make it
                    # forget one of a node that it leaves (llguidance 1.9.1): the next node, or the
                    # token that is chosen, would get that node's mask where both are as long.
                    make(row)
                    is_made = True
            if not is_made:
                make(row)

        visit(0)
        seconds = (time.thread_time() - started) / len(masks)
        self._row_seconds = max(seconds, 0.9 * self._row_seconds)
        if self._check(matcher):
            masks.fill(-1)

    def fail(self, why: str) -> None:
        """Stops the use of the state; keeps the first reason."""
        self.failure = self.failure or why

    def _current(self) -> llguidance.LLMatcher:
        assert self._matcher is not None, "not resumed"
        return self._matcher

    def _consume(self, matcher: llguidance.LLMatcher, tokens: list[int]) -> bool:
        if matcher.try_consume_tokens(tokens) == len(tokens):
            return True
        if not self._check(matcher):
            self.failure = "the grammar does not allow a token that was chosen"
        return False

    def _check(self, matcher: llguidance.LLMatcher) -> bool:
        """Notes an error of the matcher."""
        if matcher.is_error() and self.failure is None:
            error = matcher.get_error().splitlines()[0][:200]
            self.failure = f"takes too much to follow: {error}"
            if error.startswith(NO_TOKEN):
                self.failure = "no token of the model goes on with what it asks for here"
        return self.failure is not None


def _children(tree: DraftTree) -> list[list[int]]:
    """Returns, for every row, the nodes below it."""
    below: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for node, parent in enumerate(tree.parents):
        if -1 <= parent < node:
            below[parent + 1].append(node)
    return below


def _selected(tree: DraftTree, kept: Sequence[bool]) -> DraftTree:
    if all(kept):
        return tree
    new_index = {-1: -1}
    tokens: list[int] = []
    parents: list[int] = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if kept[node]:
            new_index[node] = len(tokens)
            tokens.append(token)
            parents.append(new_index[parent])
    return DraftTree(tuple(tokens), tuple(parents))
