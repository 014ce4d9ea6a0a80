"""Applies the sampling rule to the logits of a step and walks the trees."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from foredraft.sampling.noise import coins
from foredraft.sampling.rows import SamplingRows
from foredraft.sampling.sampling import (
    broken_rows,
    choose,
    choose_greedily,
    log_probs,
    probabilities,
)
from foredraft.trees.draft_tree import DraftTree, depths, paths
from foredraft.types import NO_TOKEN, SamplingParams
from verify_service.executor.choice import penalties
from verify_service.executor.choice.simulation import SimulatedAcceptance
from verify_service.executor.choice.verification import Verified, walk, walk_batch, walk_lossy
from verify_service.grammar.masks import allow_only, fill_masks, side_by_side
from verify_service.outputs import TokenLogprob
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.token_limits import WORD_BITS

# Rows chosen at a time: choosing takes several times as much memory as their logits.
CHOSEN_AT_ONCE = 256
# Rows masked, or turned into probabilities, at a time: both take still more.
MASKED_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds of lossy acceptance; 1.0 turns them off."""

    single: float = 1.0
    acc: float = 1.0

    @property
    def lossy(self) -> bool:
        """Whether tokens that the rule did not choose may be accepted."""
        return self.single < 1.0 or self.acc < 1.0


@dataclass(slots=True)
class VerifyRows:
    """The rows of one sequence in a step: its newest token, then the nodes of its tree, drafted
    with `confidence`.
    """

    sequence: RequestSequence
    tree: DraftTree
    confidence: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows, the root included."""
        return 1 + len(self.tree.tokens)


@dataclass(slots=True)
class Outcome:
    """Holds the tokens chosen for one sequence.

    Attributes:
        verified: Accepted rows and emitted tokens.
        first_lossy: Index of the first emitted token that a threshold accepted and the rule did not
            choose; None where there is none.
        logprobs: Log-probabilities of the emitted tokens; empty unless requested.
    """

    verified: Verified
    first_lossy: int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Sampler:
    """Applies the sampling rule to a batch; keeps the penalty state of sequences.

    Args:
        vocab_size: Size of the target's vocabulary.
        eos_token_ids: The model's end tokens, masked before min_new_tokens.
        thresholds: Thresholds of lossy acceptance; 1.0 turns them off.
        simulated: Replaces the rule's tokens, for benchmarks.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: frozenset[int],
        thresholds: Thresholds,
        simulated: SimulatedAcceptance | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._eos_token_ids = eos_token_ids
        self._thresholds = thresholds
        self._simulated = simulated
        self._penalties: dict[int, penalties.PenaltyState] = {}

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's end-of-sequence tokens."""
        return self._eos_token_ids

    @property
    def is_lossy(self) -> bool:
        """Whether tokens that the rule did not choose may be accepted."""
        return self._thresholds.lossy

    def trial(self) -> Callable[[], object]:
        """Returns a function that launches the kernels of a sampled step, for their compilation."""
        filtered = SamplingParams(temperature=1.0, top_p=0.9)
        logits = torch.zeros(1, self._vocab_size, device=self._device)
        rows = SamplingRows.from_params([filtered], [0], self._device)
        return lambda: choose(logits, rows)

    def forget(self, sequence: RequestSequence) -> None:
        """Drops the state of a sequence that ended."""
        self._penalties.pop(sequence.request_id, None)

    def choose(self, batch: Sequence[VerifyRows], logits: torch.Tensor) -> list[Outcome]:
        """Applies the rule at every row and walks each tree from its root.

        Args:
            logits: [rows, vocab] in the order of `batch`, root first, then nodes. Changed in place
                where they are float32.
        """
        forced: list[list[int]] = []
        if self._simulated is not None:
            forced = self._simulated.forced([rows.tree for rows in batch])
        outcomes: list[Outcome] = []
        first = begin = 0
        while first < len(batch):
            last, end = first + 1, begin + batch[first].num_rows
            while last < len(batch) and end + batch[last].num_rows <= begin + CHOSEN_AT_ONCE:
                end += batch[last].num_rows
                last += 1
            part = logits[begin:end].float()
            outcomes += self._choose(batch[first:last], part, forced[first:last])
            first, begin = last, end
        return outcomes

    def _choose(
        self, batch: Sequence[VerifyRows], logits: torch.Tensor, forced: list[list[int]]
    ) -> list[Outcome]:
        """Does the work of `choose` for a part of the batch; changes the float32 logits."""
        ends = list(itertools.accumulate(rows.num_rows for rows in batch))
        spans = list(zip([0, *ends], ends, strict=False))
        raw = self._keep_raw(batch, spans, logits)
        for rows, (first, last) in zip(batch, spans, strict=True):
            if penalties.needed(rows.sequence.sampling):
                self._penalise(rows, logits[first:last])
        self._constrain(batch, spans, logits)
        is_sampled = any(rows.sequence.sampling.is_sampled for rows in batch)
        walked: list[tuple[Verified, int | None]]
        if self._simulated is not None:
            # Its cost, and the wait for it, are part of the step.
            self._chosen(batch, logits, is_sampled)
            walked = [
                (walk(rows.tree, tokens), None) for rows, tokens in zip(batch, forced, strict=True)
            ]
        elif self._thresholds.lossy:
            walked = self._walk_lossy(batch, spans, logits)
        elif is_sampled and self._device.type == "cpu":
            walked = [(v, None) for v in self._walk_lazily(batch, spans, logits)]
        else:
            chosen = self._chosen(batch, logits, is_sampled)
            walked = [
                (walk(rows.tree, chosen[first:last]), None)
                for rows, (first, last) in zip(batch, spans, strict=True)
            ]
        return [
            Outcome(verified, first_lossy, self._logprobs(rows, raw.get(i), verified))
            for i, (rows, (verified, first_lossy)) in enumerate(zip(batch, walked, strict=True))
        ]

    def _chosen(
        self, batch: Sequence[VerifyRows], logits: torch.Tensor, is_sampled: bool
    ) -> list[int]:
        """Returns the rule's token at every row; `is_sampled` says whether any row is sampled."""
        if not is_sampled:
            return choose_greedily(logits).tolist()
        return choose(logits, self._sampling_rows(batch)).tolist()

    def _sampling_rows(self, batch: Sequence[VerifyRows]) -> SamplingRows:
        """Returns the sampling parameters of all rows."""
        params: list[SamplingParams] = []
        positions: list[int] = []
        for rows in batch:
            root = len(rows.sequence.tokens)  # index of the token that the root's row chooses
            positions.append(root)
            positions.extend(root + depth for depth in depths(rows.tree.parents))
            params.extend([rows.sequence.sampling] * rows.num_rows)
        return SamplingRows.from_params(params, positions, self._device)

    def _walk_lazily(
        self, batch: Sequence[VerifyRows], spans: list[tuple[int, int]], logits: torch.Tensor
    ) -> list[Verified]:
        """Chooses only at rows on the accepted paths: sampling a row is expensive on a CPU."""
        sampling = self._sampling_rows(batch)

        def choose_at(places: list[tuple[int, int]]) -> list[int]:
            index = torch.tensor([spans[i][0] + row for i, row in places])
            return choose(logits[index], sampling.take(index)).tolist()

        return walk_batch([rows.tree for rows in batch], choose_at)

    def _walk_lossy(
        self, batch: Sequence[VerifyRows], spans: list[tuple[int, int]], logits: torch.Tensor
    ) -> list[tuple[Verified, int | None]]:
        """Walks with the second chance of lossy acceptance; returns also which emitted token of
        each walk was the first to use it.
        """
        sampling = self._sampling_rows(batch)
        chosen = choose(logits, sampling).tolist()
        parts = (slice(i, i + MASKED_AT_ONCE) for i in range(0, len(logits), MASKED_AT_ONCE))
        probs = torch.cat([probabilities(logits[rows], sampling.take(rows)) for rows in parts])
        all_coins = coins(sampling.seed, sampling.position).tolist()
        limits = self._thresholds
        walked = []
        for rows, (first, last) in zip(batch, spans, strict=True):
            tree, by_rule = rows.tree, chosen[first:last]
            parent_rows = torch.tensor(
                [first + parent + 1 for parent in tree.parents], dtype=torch.int64
            )
            node_probs = probs[parent_rows, torch.tensor(tree.tokens, dtype=torch.int64)].tolist()
            verified = walk_lossy(
                tree, by_rule, node_probs, all_coins[first:last], limits.single, limits.acc
            )
            pairs = zip(verified.path, verified.tokens, strict=True)
            lossy = (i for i, (row, token) in enumerate(pairs) if by_rule[row] != token)
            walked.append((verified, next(lossy, None)))
        return walked

    def _keep_raw(
        self, batch: Sequence[VerifyRows], spans: list[tuple[int, int]], logits: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """Copies logits before penalties, for sequences that report log-probabilities."""
        kept = {}
        for i, rows in enumerate(batch):
            if rows.sequence.sampling.logprobs is not None:
                first, last = spans[i]
                is_changed = penalties.needed(rows.sequence.sampling) or rows.sequence.is_masked
                kept[i] = logits[first:last].clone() if is_changed else logits[first:last]
        return kept

    def _penalise(self, rows: VerifyRows, logits: torch.Tensor) -> None:
        sequence = rows.sequence
        state = self._penalties.get(sequence.request_id)
        if state is None:
            state = penalties.PenaltyState(
                sequence.sampling,
                sequence.prompt,
                self._vocab_size,
                self._device,
                self._eos_token_ids,
            )
            self._penalties[sequence.request_id] = state
        # Not all steps choose here.
        state.commit(sequence.tokens[sequence.num_prompt + state.num_committed :])
        output = sequence.num_output
        index = [output, *(output + depth for depth in depths(rows.tree.parents))]
        state.apply_(logits, paths(rows.tree), index)

    def _constrain(
        self, batch: Sequence[VerifyRows], spans: list[tuple[int, int]], logits: torch.Tensor
    ) -> None:
        """Applies the masks of grammars and forbidden tokens to the logits."""
        followed = [
            (rows.sequence, rows.tree, span)
            for rows, span in zip(batch, spans, strict=True)
            if rows.sequence.is_masked
        ]
        if not followed:
            return
        num_rows = sum(last - first for _, _, (first, last) in followed)
        masks = np.empty((num_rows, -(-self._vocab_size // WORD_BITS)), np.int32)
        work, start = [], 0
        for sequence, tree, (first, last) in followed:
            block = masks[start : start + last - first]
            work.append(functools.partial(fill_masks, sequence, tree, block))
            start += last - first
        side_by_side(work)
        rows = [row for _, _, (first, last) in followed for row in range(first, last)]
        for begin in range(0, len(rows), MASKED_AT_ONCE):
            index = rows[begin : begin + MASKED_AT_ONCE]
            broken = broken_rows(logits[index])
            allow_only(logits, index, torch.from_numpy(masks[begin : begin + MASKED_AT_ONCE]))
            # Broken logits are broken whatever the masks allow.
            logits[index, 0] = torch.where(broken, math.nan, logits[index, 0])

    def _logprobs(
        self, rows: VerifyRows, raw: torch.Tensor | None, verified: Verified
    ) -> list[TokenLogprob]:
        if raw is None or verified.tokens[-1] == NO_TOKEN:
            return []
        top_n = rows.sequence.sampling.logprobs or 0
        tokens = torch.tensor(verified.tokens, device=self._device)
        values, top_tokens, top_values = log_probs(raw[verified.path], tokens, top_n)
        return [
            TokenLogprob(value, ids, tops)
            for value, ids, tops in zip(
                values.tolist(), top_tokens.tolist(), top_values.tolist(), strict=True
            )
        ]
