"""The step of a model that drafts ahead: while the target verifies a chain, it prepares the chains
that follow the likeliest outcomes.

The next step then finds its chain ready if its outcome is among them. It tells the verifier so at
once, and computes only the committed tokens, while the target is at work; it drafts nothing if the
host has seen so too.
"""

from dataclasses import replace

import torch

from draft_service.steps.batches import DraftBatches
from draft_service.steps.draft_step import SamplingMode, StepOptions
from draft_service.steps.level_step import Forward, LevelStep
from draft_service.steps.outcomes import ALTERNATIVES, Outcomes
from draft_service.steps.plan import DraftPlan
from draft_service.steps.records import STEP
from foredraft.attention.base import Batch
from foredraft.attention.triton_plan import TritonPlan, splits_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.sampling.rows import SamplingRows
from foredraft.sampling.sampling import greedy, perturbed_top, scrub

# Largest batch that is tried: the target waits unless every sequence's outcome was prepared, which
# is seldom in larger ones, and their graphs need memory.
MOST_SEQUENCES = 2


def num_levels(num_steps: int) -> int:
    """Returns the number of levels that have KV of their own: those of the verified chain, and
    of the outcomes with the chains that continue them.
    """
    return num_steps + num_steps * (num_steps + 1) * ALTERNATIVES


class AheadStep(LevelStep):
    """Steps of a whole model that drafts chains.

    Scratch has the verified chain first, then level by level one row of each outcome.

    See LevelStep for the arguments.
    """

    outcomes: Outcomes

    def __init__(
        self,
        forward: Forward,
        kv: PagedKV,
        options: StepOptions,
        token_map: torch.Tensor | None,
    ) -> None:
        shape, device = options.shape, kv.data.device
        # A chain has a level for each row of scratch, and one more.
        planned = replace(shape, num_steps=num_levels(shape.num_steps) + 1)
        super().__init__(forward, None, kv, options, token_map, planned)
        most = min(MOST_SEQUENCES, options.max_batch)
        self.outcomes = Outcomes.empty(shape.max_slots + 1, most, shape.num_steps, device)
        length, width = shape.num_steps, self.outcomes.num_outcomes
        accepted = torch.arange(width, device=device) // ALTERNATIVES
        own = torch.eye(width, dtype=torch.bool, device=device)
        verified = torch.arange(length, device=device) < accepted[:, None]
        self._accepted, self._seen = accepted, torch.cat((verified, own.repeat(1, length)), 1)

    def prepare(self, batch: int) -> DraftBatches:
        """See DraftStep. Hands on the trees of sequences whose outcome was prepared."""
        batches = super().prepare(batch)
        if batch <= self.outcomes.max_batch:
            records = self.uploads.on_device(batch)
            self.operations.select(records, batches.plan, self.inputs.handed_on, self.outcomes)
            self.outcomes.host_report.copy_(self.outcomes.report, non_blocking=True)
        return batches

    def hand_on(self, batch: int) -> None:
        """See DraftStep. A tree that was handed on already stays as it is."""
        if batch <= self.outcomes.max_batch:
            self.results[:batch, 0] = self._newest_chains(batch)
        super().hand_on(batch)

    def _newest_chains(self, batch: int) -> torch.Tensor:
        """Returns the chains that the target verifies now, int32 [B, S]: those that were found,
        and drafted ones.
        """
        is_hit, found = self.outcomes.is_hit[:batch, None], self.outcomes.found[:batch]
        return torch.where(is_hit, found, self.results[:batch, 0])

    def look_ahead(self, batch: int, mode: SamplingMode) -> None:
        """See DraftStep. Prepares the chains that continue the outcomes."""
        batches = self.batches_of(batch)
        plan, rows = batches.plan, batches.sampling(*mode)
        length, outcomes = self.shape.num_steps, self.outcomes
        verified = self._newest_chains(batch).long()
        logits = self._logits(plan, verified, 0, torch.arange(length, device=self.device), None)
        logits = torch.cat((self._root_logits[:batch, None].to(logits.dtype), logits), 1)
        depths = torch.arange(length + 1, device=self.device)
        ends = self._best(logits, rows, depths, ALTERNATIVES).flatten(1)
        chains, tokens = [], ends
        for level in range(length):
            first = length + level * outcomes.num_outcomes
            seen = self._seen[:, : first + outcomes.num_outcomes].repeat(batch, 1)
            logits = self._logits(plan, tokens, first, self._accepted + level, seen)
            tokens = self._best(logits, rows, self._accepted + level + 1, 1)[:, :, 0]
            chains.append(tokens)
        slots = self.uploads.on_device(batch)[:, STEP["slot"]].long()
        outcomes.keep(slots, plan.num_keys, verified, ends, torch.stack(chains, 2))

    def _logits(
        self,
        plan: DraftPlan,
        tokens: torch.Tensor,
        first: int,
        depths: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs rows of scratch; returns their logits [B, n, V].

        Args:
            plan: The step's plan.
            tokens: int64 [B, n], the rows' tokens.
            first: Index of the first row in scratch.
            depths: int64 [n], how far each row is from the first position behind the committed
                keys.
            seen: bool [B * n, first + n], the rows of scratch that each row sees; None for a chain
                from the first one on.
        """
        batch, count = tokens.shape
        start = torch.arange(0, batch * count, count, dtype=torch.int32, device=self.device)
        places = None
        if self.shape.is_windowed and seen is not None:
            places = self._places(plan, first + count)
        positions = (plan.num_keys[:, None] + depths).flatten()
        slots = plan.level_slots[first : first + count].t().flatten()
        attention = TritonPlan(
            kv=self.kv,
            page_tables=plan.tables,
            first_row=start,
            num_rows=plan.num_beams * count,
            prefix_start=plan.valid_from,
            prefix_len=plan.num_keys,
            write_index=plan.num_keys + first,
            positions=positions,
            tail_mask=seen,
            tail_positions=places,
            max_rows=count,
            num_splits=splits_for(batch, count, self.kv, self.shape.max_pages * self.kv.page_size),
        )
        rows = Batch(tokens.flatten(), positions, slots, (), plan=attention)
        logits, _ = self._forward(rows, None, None)
        return logits.view(batch, count, -1)

    def _places(self, plan: DraftPlan, width: int) -> torch.Tensor:
        """Returns the positions of the first rows of scratch, int32 [B, width]."""
        length = self.shape.num_steps
        levels = torch.arange(length, device=self.device)
        depths = torch.cat((levels, (levels[:, None] + self._accepted).flatten()))
        return (plan.num_keys[:, None] + depths[:width]).to(torch.int32)

    def _best(
        self, logits: torch.Tensor, rows: SamplingRows, depths: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Returns the tokens that most likely follow rows, int64 [B, n, count], best first.

        Args:
            logits: [B, n, V], of the rows.
            rows: Sampling parameters of the sequences.
            depths: int64 [n], how far each chosen token is from the first drafted one.
        """
        batch, num_rows, _ = logits.shape
        logits = scrub(logits.flatten(0, 1).float())
        best = greedy(logits)[:, None] if count == 1 else logits.topk(count).indices
        if rows.any_sampled:
            owner = torch.arange(batch, device=self.device).repeat_interleave(num_rows)
            each = rows.take(owner)
            each = replace(each, position=each.position + depths.repeat(batch))
            drawn, _ = perturbed_top(logits, each, count, self._token_map)
            best = torch.where(each.temperature[:, None] > 0, drawn, best)
        best = best if self._token_map is None else self._token_map[best]
        return best.view(batch, num_rows, count)
