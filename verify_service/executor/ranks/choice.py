"""Chooses tokens where each rank has the logits of its own part of the vocabulary.

The ranks exchange their best tokens, and whole rows only where a request needs them.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from foredraft.layers.embedding import LMHead
from foredraft.sampling.rows import SamplingRows
from foredraft.sampling.sampling import greedy, perturbed_top, scrub
from foredraft.trees.draft_tree import depths
from foredraft.types import NO_TOKEN, SamplingParams
from verify_service.executor.choice import penalties
from verify_service.executor.choice.sampler import Outcome, Sampler, VerifyRows
from verify_service.executor.choice.verification import walk, walk_batch
from verify_service.executor.ranks import messages
from verify_service.executor.ranks.board import timed
from verify_service.executor.ranks.workers import Ranks


class LocalLogits:
    """Holds a rank's part of a forward's logits; all ranks call the same methods.

    Args:
        head: LM head of the model; it does not gather.

    Attributes:
        logits: [rows, head.share.size], logits of the newest forward; minus infinity in columns
            after the rank's own tokens.
    """

    def __init__(self, head: LMHead) -> None:
        self._head, self._group = head, head.share.group
        self._tokens = head.share.first + torch.arange(head.share.size, device=head.weight.device)
        self.logits = torch.empty(0, head.share.size, device=head.weight.device)

    def gather(self, index: Sequence[int]) -> torch.Tensor:
        """Returns whole rows of logits, [len(index), vocab_size]."""
        return self._head.gather(self.logits[list(index)])

    def choose(self, index: Sequence[int], rows: SamplingRows) -> torch.Tensor:
        """Chooses a token for each row, bit for bit as `sampling.choose` does for whole rows.

        Args:
            index: Indices of the rows in `logits`.
            rows: Sampling parameters of the rows, without top-k and top-p.

        Returns:
            int64 [R], the chosen tokens; NO_TOKEN for rows with NaN or plus infinity.
        """
        logits = self.logits[list(index)].float()
        finite = scrub(logits)
        # NaN counts as larger than any number, here and below.
        best, chosen = self._best(logits.amax(-1), self._tokens[greedy(finite)])
        broken = ~(best < torch.inf)
        if rows.any_sampled:
            is_sampled = (rows.temperature > 0) & ~broken
            if bool(is_sampled.any()):
                drawn, scores = perturbed_top(
                    finite[is_sampled],
                    rows.take(is_sampled),
                    1,
                    token_map=self._tokens,
                    best=best[is_sampled],
                )
                found = self._best(scores[:, 0], self._tokens[drawn[:, 0]])
                chosen[is_sampled] = found[1]
        return chosen.masked_fill_(broken, NO_TOKEN)

    def _best(
        self, values: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the largest of the ranks' values [R] and its token [R].

        Of equal values the first rank's is taken, which has the lowest token.
        """
        # Doubles hold values and tokens exactly.
        pairs = torch.stack([values.double(), tokens.double()], -1)
        of_ranks = self._group.all_gather(pairs).view(len(values), -1, 2)
        first = of_ranks[..., 0].argmax(-1, keepdim=True)
        best = of_ranks.gather(1, first[..., None].expand(-1, -1, 2))[:, 0]
        return best[:, 0].float(), best[:, 1].long()


class RankedSampler(Sampler):
    """Rank 0's sampler, which tells the other ranks the rows to choose tokens at.

    Sequences that need whole rows (top-k, top-p, penalties, masks, log-probabilities) are handled
    on rank 0 alone.

    Args:
        ranks: The running ranks.
        head: LM head of rank 0's model.
        arguments: Arguments of Sampler.
    """

    def __init__(self, ranks: Ranks, head: LMHead, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._board, self._local = ranks.board, LocalLogits(head)

    def choose(self, batch: Sequence[VerifyRows], logits: torch.Tensor) -> list[Outcome]:
        """See Sampler; `logits` are rank 0's part of each row."""
        self._local.logits = logits
        first_rows = [0, *itertools.accumulate(one.num_rows for one in batch)]
        outcomes: dict[int, Outcome] = {}
        if whole := [i for i, one in enumerate(batch) if self._needs_whole(one)]:
            index = [row for i in whole for row in range(first_rows[i], first_rows[i + 1])]
            self._board.write(messages.gather(index))
            with timed(self._board):
                gathered = self._local.gather(index)
            own = super().choose([batch[i] for i in whole], gathered)
            outcomes.update(zip(whole, own, strict=True))
        if rest := [i for i in range(len(batch)) if i not in outcomes]:
            own = self._choose_locally([batch[i] for i in rest], [first_rows[i] for i in rest])
            outcomes.update(zip(rest, own, strict=True))
        return [outcomes[i] for i in range(len(batch))]

    def _needs_whole(self, rows: VerifyRows) -> bool:
        sampling = rows.sequence.sampling
        return (
            self._simulated is not None
            or self.is_lossy
            or sampling.is_ranked
            or sampling.logprobs is not None
            or rows.sequence.is_masked
            or penalties.needed(sampling)
        )

    def _choose_locally(
        self, batch: Sequence[VerifyRows], first_rows: Sequence[int]
    ) -> list[Outcome]:
        roots = [len(one.sequence.tokens) for one in batch]
        below = [[0, *depths(one.tree.parents)] for one in batch]

        def choose_at(places: list[tuple[int, int]]) -> list[int]:
            params: list[SamplingParams] = [batch[i].sequence.sampling for i, _ in places]
            positions = [roots[i] + below[i][row] for i, row in places]
            rows = SamplingRows.from_params(params, positions, self._device)
            index = [first_rows[i] + row for i, row in places]
            self._board.write(messages.choice(index, rows))
            with timed(self._board):
                return self._local.choose(index, rows).tolist()

        trees = [one.tree for one in batch]
        if any(one.sequence.sampling.is_sampled for one in batch):
            # Sampling is expensive on a CPU, so only the rows of the walk are sampled.
            return [Outcome(verified) for verified in walk_batch(trees, choose_at)]
        places = [(i, row) for i, one in enumerate(batch) for row in range(one.num_rows)]
        chosen = iter(choose_at(places))
        return [
            Outcome(walk(tree, [next(chosen) for _ in below[i]])) for i, tree in enumerate(trees)
        ]
