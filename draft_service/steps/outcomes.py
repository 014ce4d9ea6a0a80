"""The likeliest outcomes of the target's running step, and the chain that continues each."""

from dataclasses import dataclass

import torch

from draft_service.steps.hand_on import HandedOn
from draft_service.steps.plan import DraftPlan
from draft_service.steps.records import STEP
from foredraft.trees.draft_tree import NO_PARENT

# Tokens that an outcome may end with, for each number of accepted ones. The first is mostly the
# chain's own next one: the target chooses it where it did not verify the chain so far.
ALTERNATIVES = 3


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Holds prepared chains by slot; the last slot is padding's.

    Outcome c of a sequence accepts `c // ALTERNATIVES` tokens of its chain, and ends with a token
    of the target's.

    Attributes:
        num_keys: int32 [slots], keys that the draft had when it prepared; -1 for nothing prepared.
        verified: int32 [slots, S], the chain that the target verifies.
        ends: int32 [slots, C], each outcome's last token.
        chains: int32 [slots, C, S], the chain that continues each outcome.
        is_hit: bool [B], whether a sequence's committed tokens were one of its outcomes.
        found: int32 [B, S], the chain that continues it then.
        report: int32 [3]: number of steps that found the outcomes of all sequences prepared; number
            of steps that looked and missed one; number of the newest step, negative unless its
            trees were all handed on.
        host_report: The same on the host, a copy.
    """

    num_keys: torch.Tensor
    verified: torch.Tensor
    ends: torch.Tensor
    chains: torch.Tensor
    is_hit: torch.Tensor
    found: torch.Tensor
    report: torch.Tensor
    host_report: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, batch: int, length: int, device: torch.device) -> "Outcomes":
        """Creates the buffers.

        Args:
            num_slots: Number of slots, padding's included.
            batch: Maximum number of sequences of a step.
            length: Number of tokens of a chain, S.
        """
        num_outcomes = (length + 1) * ALTERNATIVES

        def make(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            num_keys=make(num_slots).fill_(-1),
            verified=make(num_slots, length),
            ends=make(num_slots, num_outcomes),
            chains=make(num_slots, num_outcomes, length),
            is_hit=torch.zeros(batch, dtype=torch.bool, device=device),
            found=make(batch, length),
            report=make(3),
            host_report=torch.zeros(3, dtype=torch.int32, pin_memory=device.type == "cuda"),
        )

    @property
    def max_batch(self) -> int:
        """Maximum number of sequences of a step."""
        return len(self.is_hit)

    @property
    def length(self) -> int:
        """Number of tokens of a chain."""
        return self.verified.shape[1]

    @property
    def num_outcomes(self) -> int:
        """Number of outcomes of a sequence."""
        return self.ends.shape[1]

    def keep(self, slots: torch.Tensor, num_keys: torch.Tensor, *values: torch.Tensor) -> None:
        """Stores what was prepared for sequences.

        Args:
            slots: int64 [B], slots of the sequences.
            num_keys: int32 [B].
            values: [B, S], [B, C] and [B, C, S], see `verified`, `ends` and `chains`.
        """
        self.num_keys.index_copy_(0, slots, num_keys)
        for kept, value in zip((self.verified, self.ends, self.chains), values, strict=True):
            kept.index_copy_(0, slots, value.to(torch.int32))


def select(records: torch.Tensor, plan: DraftPlan, handed_on: HandedOn, outcomes: Outcomes) -> None:
    """Looks for what was committed among the prepared outcomes.

    Hands on the tree of a sequence whose outcome is there. If all are, marks the trees of the
    records' step as written, so that the verifier need not wait for this step's forwards.

    Args:
        records: int32 [B, STEP.size + 2 * R]; only those with a step are looked for.
        plan: The step's plan, filled in: nothing of `handed_on` is read after this.
        outcomes: `is_hit`, `found` and `report` are changed.
    """
    batch, length, rows = len(records), outcomes.length, len(plan.tokens) // len(records)
    slots, row = records[:, STEP["slot"]].long(), records[:, STEP["row"]].long()
    step = records[0, STEP["step"]]  # padding comes last
    is_padding = slots == len(outcomes.num_keys) - 1
    is_prepared = (outcomes.num_keys[slots] == plan.start) & (records[:, STEP["step"]] > 0)
    tokens = plan.tokens.view(batch, rows).to(torch.int32)
    num_same = (tokens[:, :length] == outcomes.verified[slots]).cumprod(1).sum(1)
    outcome = torch.arange(outcomes.num_outcomes, device=records.device)
    accepted = outcome // ALTERNATIVES
    is_found = (plan.num_rows[:, None] == accepted + 1) & (num_same[:, None] >= accepted)
    is_found &= tokens[:, accepted] == outcomes.ends[slots]
    is_found &= is_prepared[:, None]
    is_hit, first = is_found.any(1), is_found.to(torch.int32).argmax(1)
    outcomes.is_hit[:batch] = is_hit
    found = outcomes.chains[slots, first]
    outcomes.found[:batch] = found
    trees = handed_on.trees
    whole = torch.full_like(trees[:batch], NO_PARENT)
    whole[:, 0, :length] = found
    whole[:, 1, :length] = torch.arange(-1, length - 1, device=records.device)
    trees.index_copy_(0, row, torch.where(is_hit[:, None, None], whole, trees[row]))
    all_prepared = (step > 0) & (is_prepared | is_padding).all()
    is_over = all_prepared & (is_hit | is_padding).all()
    outcomes.report[0] += is_over
    outcomes.report[1] += all_prepared & ~is_over
    outcomes.report[2] = torch.where(is_over, step, -step)
    handed_on.drafted.copy_(torch.where(is_over, step, handed_on.drafted))
