"""A target without a model: the next token is a hash of the history that its KV holds, so any wrong page shows as a wrong token.

Steps run when they are started, which is the order of a GPU's stream; what they gave is handed out later. Where a sequence
stands is kept by slot, and page tables are copied as a GPU's are, so that the engine's account of both is put to the test.
"""

from collections.abc import Callable, Sequence

import torch

from foredraft.speculation.draft_tree import EMPTY, DraftTree, sanitize
from foredraft.speculation.verification import walk
from verify_service.chooser import Outcome, VerifyRows
from verify_service.request import Sequence as RequestSequence
from verify_service.step_plan import PrefillChunk
from verify_service.target_step import (
    AheadRows,
    DeviceOutcome,
    StartedStep,
    StepResult,
    TargetStep,
)

MASK = (1 << 61) - 1


def mix(history: int, token: int) -> int:
    """The history that one more token makes."""
    return (history * 6364136223846793005 + token * 1442695040888963407 + 1013904223) & MASK


def choose(history: int, vocab_size: int) -> int:
    """The token that follows a history."""
    return (history >> 20) % vocab_size


def decode(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What follows a prompt."""
    history = 0
    for token in prompt:
        history = mix(history, token)
    out = []
    for _ in range(num_tokens):
        out.append(choose(history, vocab_size))
        history = mix(history, out[-1])
    return out


class ToyStep(StartedStep):
    """A step that has run already."""

    def __init__(
        self, num_rows: int, result: StepResult, trees: list[DraftTree], rows: list[int]
    ) -> None:
        self.num_rows, self._result, self._trees = num_rows, result, trees
        empty = torch.zeros(0)
        self.outcome = DeviceOutcome(len(trees), torch.tensor(rows), empty, result.output)

    @property
    def is_done(self) -> bool:
        return True

    def finish(self) -> tuple[StepResult, list[DraftTree]]:
        return self._result, self._trees


class ToyTarget(TargetStep):
    """See the module.

    Attributes:
        standing: By slot, committed keys and the newest token.
    """

    def __init__(self, page_size: int, vocab_size: int, max_rows: int) -> None:
        self._page_size, self._vocab_size, self._max_rows = page_size, vocab_size, max_rows
        self._kv: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}
        self.standing: dict[int, tuple[int, int]] = {}

    def committed(self, sequence: RequestSequence, tokens: Sequence[int]) -> None:
        pass

    def forget(self, sequence: RequestSequence) -> None:
        pass

    def can_start(self, batch: Sequence[VerifyRows]) -> bool:
        return bool(batch) and all(rows.sequence.sampling.min_p == 0 for rows in batch)

    def start(self, batch: Sequence[VerifyRows], capture: Sequence[int]) -> StartedStep:
        num_rows = self._max_rows if any(rows.tree.tokens for rows in batch) else 1
        work = [
            (rows.sequence, rows.sequence.num_computed, rows.sequence.tokens[-1], rows.tree)
            for rows in batch
        ]
        return self._start(work, num_rows)

    def start_ahead(
        self,
        batch: Sequence[AheadRows],
        capture: Sequence[int],
        num_rows: int,
        fetch: Callable[[torch.Tensor], None] | None,
    ) -> StartedStep:
        trees: list[DraftTree] = [EMPTY] * len(batch)
        if fetch is not None:
            fetched = torch.zeros(64, 2, self._max_rows - 1, dtype=torch.int64)
            fetch(fetched)
            for i, rows in enumerate(batch):
                if rows.tree is not None:
                    tokens, parents = fetched[rows.tree].tolist()
                    size = min(num_rows - 1, sum(parent >= -1 for parent in parents))
                    trees[i], _ = sanitize(
                        tokens[:size], parents[:size], self._vocab_size, num_rows - 1
                    )
        work = []
        for rows, tree in zip(batch, trees, strict=True):
            committed, root = self.standing[rows.sequence.slot]
            work.append((rows.sequence, committed, root, tree))
        return self._start(work, num_rows)

    def run(
        self,
        batch: Sequence[VerifyRows],
        chunks: Sequence[PrefillChunk],
        capture: Sequence[int],
    ) -> StepResult:
        last = {chunk.seq.request_id for chunk in chunks if chunk.is_last}
        outcomes = [
            self._verify(
                rows.sequence, rows.sequence.num_computed, rows.sequence.tokens[-1], rows.tree
            )
            for rows in batch
            if rows.sequence.request_id not in last
        ]
        for chunk in chunks:
            sequence = chunk.seq
            tokens = sequence.tokens[chunk.start : chunk.start + chunk.num_tokens]
            history = self._history(sequence, chunk.start)
            for i, token in enumerate(tokens):
                history = mix(history, token)
                self._kv[self._slot(sequence, chunk.start + i)] = history
            if chunk.is_last:
                token = choose(history, self._vocab_size)
                outcomes.append(Outcome(walk(EMPTY, [token])))
        return StepResult(outcomes, None, (), len(batch), 0.0)  # type: ignore[arg-type]

    def _start(
        self, work: list[tuple[RequestSequence, int, int, DraftTree]], num_rows: int
    ) -> StartedStep:
        outcomes = []
        for sequence, committed, root, tree in work:
            outcome = self._verify(sequence, committed, root, tree)
            tokens = outcome.verified.tokens
            assert sequence.slot is not None
            self.standing[sequence.slot] = (committed + len(tokens), tokens[-1])
            outcomes.append(outcome)
        result = StepResult(outcomes, None, (), len(work), 0.0)  # type: ignore[arg-type]
        slots = [sequence.slot or 0 for sequence, *_ in work]
        return ToyStep(num_rows, result, [tree for *_, tree in work], slots)

    def _verify(
        self, sequence: RequestSequence, committed: int, root: int, tree: DraftTree
    ) -> Outcome:
        histories = [mix(self._history(sequence, committed), root)]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            histories.append(mix(histories[parent + 1], token))
        for row, history in enumerate(histories):
            self._kv[self._slot(sequence, committed + row)] = history
        verified = walk(tree, [choose(history, self._vocab_size) for history in histories])
        for i, row in enumerate(verified.path):
            self._kv[self._slot(sequence, committed + i)] = histories[row]
        return Outcome(verified)

    def _history(self, sequence: RequestSequence, num_keys: int) -> int:
        return self._kv[self._slot(sequence, num_keys - 1)] if num_keys else 0

    def _slot(self, sequence: RequestSequence, key: int) -> int:
        assert sequence.slot is not None
        table = self._tables.setdefault(sequence.slot, [])
        first = sequence.device_pages_from
        if first < len(sequence.pages):
            table[first:] = sequence.pages[first:]
            sequence.device_pages_from = len(sequence.pages)
        return table[key // self._page_size] * self._page_size + key % self._page_size
