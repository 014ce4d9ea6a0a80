"""A target without a model: the next token is a hash of the history that its KV holds, so any wrong
page shows as a wrong token.

Steps run when they are started, which is the order of a GPU's stream; what they gave is handed out
later. Where a sequence stands is kept by slot, and page tables are copied as a GPU's are, so that
the engine's account of both is put to the test. Where a sequence follows a grammar, only the
forward runs when the step is started, and the tokens are chosen later.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from foredraft.runner.model_runner import ForwardOutput
from foredraft.trees.draft_tree import EMPTY, DraftTree, sanitize
from verify_service.executor.base import (
    Ahead,
    DeviceOutcome,
    Executor,
    FinishedStep,
    PendingStep,
    Step,
    StepResult,
)
from verify_service.executor.choice.sampler import Outcome, VerifyRows
from verify_service.executor.choice.verification import walk
from verify_service.grammar.masks import fill_two_phase_masks
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.step_plan import PrefillChunk

MASK = (1 << 61) - 1


def mix(history: int, token: int) -> int:
    """Returns the history with one more token."""
    return (history * 6364136223846793005 + token * 1442695040888963407 + 1013904223) & MASK


def choose(history: int, vocab_size: int) -> int:
    """Returns the token that follows a history."""
    return (history >> 20) % vocab_size


def decode(
    prompt: Sequence[int],
    num_tokens: int,
    vocab_size: int,
    allows: Callable[[list[int], int], bool] = lambda output, token: True,
) -> list[int]:
    """Returns the continuation of a prompt, where some outputs may not be followed by every
    token.
    """
    history = 0
    for token in prompt:
        history = mix(history, token)
    out: list[int] = []
    for _ in range(num_tokens):
        token = choose(history, vocab_size)
        while not allows(out, token):
            token = (token + 1) % vocab_size
        out.append(token)
        history = mix(history, out[-1])
    return out


class ToyGrammar:
    """Stands in for a `GrammarState`.

    It forbids every third token, depending on those before; 11 is the end.

    Args:
        max_nodes: Maximum nodes of trees that are followed in overlapped steps.
    """

    failure = None
    is_current = False  # so that `resume` compares

    def __init__(self, vocab_size: int, max_nodes: int = 100) -> None:
        self._vocab_size, self.max_nodes = vocab_size, max_nodes
        self._output: list[int] | None = None

    def follow(self) -> "ToyGrammar":
        return self

    def release(self) -> None:
        self._output = None

    def resume(self, output: Sequence[int]) -> None:
        if self._output is None:
            self._output = list(output)
        assert self._output == list(output)

    def advance(self, tokens: Sequence[int]) -> tuple[int, bool]:
        assert self._output is not None
        for i, token in enumerate(tokens):
            assert self.allows(self._output, token), "a token that no mask allowed was chosen"
            self._output.append(token)
            if token == END:
                return i + 1, True
        return len(tokens), False

    def allows(self, output: Sequence[int], token: int) -> bool:
        return (sum(output) + token) % 3 != 0

    def prune(self, tree: DraftTree) -> DraftTree:
        assert self._output is not None
        below = [self._output]
        parents = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            before = below[parent + 1]
            is_kept = before is not LOST and END not in before and self.allows(before, token)
            below.append([*before, token] if is_kept else LOST)
            parents.append(parent if is_kept else len(parents))
        kept, _ = sanitize(tree.tokens, parents, self._vocab_size, len(tree))
        return kept

    def fill(self, tree: DraftTree, masks: npt.NDArray[np.int32]) -> None:
        assert self._output is not None
        masks[:] = -1
        below = [self._output]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            is_node = -1 <= parent < len(below) - 1 and below[parent + 1] is not LOST
            below.append([*below[parent + 1], token] if is_node else LOST)
        for mask, output in zip(masks, below, strict=True):
            for token in range(self._vocab_size):
                if output is not LOST and not self.allows(output, token):
                    mask[token // 32] &= ~np.int32(1 << token % 32 if token % 32 < 31 else -(2**31))


END = 11
LOST: list[int] = [-1]  # path to an absent node


def allowed_token(mask: npt.NDArray[np.int32], token: int, vocab_size: int) -> int:
    """Returns the first allowed token from `token` on."""
    while not mask[token // 32] >> token % 32 & 1:
        token = (token + 1) % vocab_size
    return token


class ToyStep(PendingStep):
    """A step that has run, except for the choice of its tokens in a two-phase step.

    Args:
        choose: Function that returns the outcome.
        output: Hidden states for a draft that reads them.
    """

    def __init__(
        self,
        num_rows: int,
        trees: list[DraftTree],
        rows: list[int],
        choose: Callable[[], StepResult],
        is_two_phase: bool = False,
        output: ForwardOutput | None = None,
    ) -> None:
        self.num_rows, self._trees, self._choose = num_rows, trees, choose
        self._result = None if is_two_phase else choose()
        empty = torch.zeros(0)
        self.outcome = DeviceOutcome(len(trees), torch.tensor(rows), empty, output)  # type: ignore[arg-type]

    @property
    def is_done(self) -> bool:
        return True

    @property
    def is_chosen(self) -> bool:
        return self._result is not None

    def choose(self) -> None:
        if self._result is None:
            self._result = self._choose()

    def finish(self) -> StepResult:
        assert self._result is not None, "nothing was chosen"
        return dataclasses.replace(self._result, trees=self._trees)


class ToyTarget(Executor):
    """Executes steps of the toy target, see the module.

    Attributes:
        standing: Number of committed keys, and the newest token, by slot.
        num_two_phase: Number of overlapped steps whose tokens were chosen in a second phase.
    """

    num_two_phase = 0

    def __init__(self, page_size: int, vocab_size: int, max_rows: int) -> None:
        self._page_size, self._vocab_size, self._max_rows = page_size, vocab_size, max_rows
        self._kv: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}
        self.standing: dict[int, tuple[int, int]] = {}
        self._newest: ToyStep | None = None

    def forget(self, sequence: RequestSequence) -> None:
        pass

    def close(self) -> None:
        pass

    def can_overlap(self, step: Step) -> bool:
        is_simple = all(rows.sequence.sampling.min_p == 0 for rows in step.batch)
        return bool(step.batch) and not step.chunks and is_simple

    def submit(self, step: Step) -> PendingStep:
        if step.ahead is not None:
            return self._submit_ahead(step, step.ahead)
        if not self.can_overlap(step):
            return FinishedStep(self._run(step.batch, step.chunks))
        num_rows = self._max_rows if any(rows.tree.tokens for rows in step.batch) else 1
        work = [
            (rows.sequence, rows.sequence.num_computed, rows.sequence.tokens[-1], rows.tree)
            for rows in step.batch
        ]
        return self._start(work, num_rows)

    def _submit_ahead(self, step: Step, ahead: Ahead) -> PendingStep:
        batch, num_rows = step.batch, ahead.num_rows
        trees: list[DraftTree] = [EMPTY] * len(batch)
        if ahead.fetch is not None:
            fetched = torch.zeros(64, 2, self._max_rows - 1, dtype=torch.int64)
            ahead.fetch(fetched)
            for i, row in enumerate(ahead.tree_rows):
                if row is not None:
                    tokens, parents = fetched[row].tolist()
                    size = min(num_rows - 1, sum(parent >= -1 for parent in parents))
                    trees[i], _ = sanitize(
                        tokens[:size], parents[:size], self._vocab_size, num_rows - 1
                    )
        work = []
        for rows, tree in zip(batch, trees, strict=True):
            committed, root = self.standing[rows.sequence.slot]
            work.append((rows.sequence, committed, root, tree))
        started = self._start(work, num_rows)
        self.num_two_phase += not started.is_chosen
        return started

    def _run(self, batch: Sequence[VerifyRows], chunks: Sequence[PrefillChunk]) -> StepResult:
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
                outcomes.append(self._walk(sequence, chunk.start + len(tokens), EMPTY, [history]))
        return StepResult(
            outcomes,
            None,  # type: ignore[arg-type]
            (),
            len(batch),
            0.0,
            prompt_logprobs=[[] for _ in chunks],
        )

    def _start(
        self, work: list[tuple[RequestSequence, int, int, DraftTree]], num_rows: int
    ) -> ToyStep:
        assert self._newest is None or self._newest.is_chosen, "its state is not known"
        histories = [self._forward(*one) for one in work]

        def choose_all() -> StepResult:
            outcomes = []
            for (sequence, committed, _, tree), known in zip(work, histories, strict=True):
                slot = slots[len(outcomes)]
                outcomes.append(self._walk(sequence, committed, tree, known, tables[slot]))
                tokens = outcomes[-1].verified.tokens
                self.standing[slot] = (committed + len(tokens), tokens[-1])
            return StepResult(outcomes, None, (), len(work), 0.0)  # type: ignore[arg-type]

        slots = [sequence.slot or 0 for sequence, *_ in work]
        # A sequence that ends before has no pages any more, but the device has.
        tables = {slot: list(self._tables[slot]) for slot in slots}
        is_two_phase = any(sequence.grammar is not None for sequence, *_ in work)
        self._newest = ToyStep(
            num_rows, [tree for *_, tree in work], slots, choose_all, is_two_phase
        )
        return self._newest

    def _verify(
        self, sequence: RequestSequence, committed: int, root: int, tree: DraftTree
    ) -> Outcome:
        histories = self._forward(sequence, committed, root, tree)
        return self._walk(sequence, committed, tree, histories)

    def _forward(
        self, sequence: RequestSequence, committed: int, root: int, tree: DraftTree
    ) -> list[int]:
        """Returns the histories of all rows, and writes them to the KV."""
        histories = [mix(self._history(sequence, committed), root)]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            histories.append(mix(histories[parent + 1], token))
        for row, history in enumerate(histories):
            self._kv[self._slot(sequence, committed + row)] = history
        return histories

    def _walk(
        self,
        sequence: RequestSequence,
        committed: int,
        tree: DraftTree,
        histories: list[int],
        table: list[int] | None = None,
    ) -> Outcome:
        chosen = [choose(history, self._vocab_size) for history in histories]
        if sequence.grammar is not None:
            masks = np.empty((len(histories), -(-self._vocab_size // 32)), np.int32)
            fill_two_phase_masks(sequence, tree, masks)
            chosen = [
                allowed_token(mask, token, self._vocab_size)
                for mask, token in zip(masks, chosen, strict=True)
            ]
        verified = walk(tree, chosen)
        for i, row in enumerate(verified.path[1:], 1):
            if table is None:
                place = self._slot(sequence, committed + i)
            else:
                key = committed + i
                place = table[key // self._page_size] * self._page_size + key % self._page_size
            self._kv[place] = histories[row]
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
