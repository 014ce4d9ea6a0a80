"""Estimates what a draft with nearly free proposals, such as n-grams, brings: tokens beyond plain
decoding's.
"""

from collections.abc import Sequence

from verify_service.controller.bank import Bank
from verify_service.controller.config import ControllerConfig
from verify_service.controller.costs import CostModel
from verify_service.controller.messages import Candidates, DraftHistory, DraftKind


class AskedFirst:
    """Estimates what asking a draft is worth, for all sequences and for each.

    Args:
        number: Number of the draft.
        config: Numbers of the policy.
    """

    def __init__(self, number: int, config: ControllerConfig) -> None:
        self._number, self._config = number, config
        self._worth, self._count = config.prior_chance, 0.0

    def worth(self, histories: Sequence[DraftHistory], is_optimistic: bool) -> list[float]:
        """Returns the tokens that asking brings for each sequence, 0 at least.

        Args:
            histories: Histories of the sequences.
            is_optimistic: Whether estimates are at least the prior while little is known: a few
                answers that bring nothing are no sign, since matches come in runs.
        """
        config, known, prior = self._config, self._worth, self._config.prior_outcomes
        least = config.prior_chance * (is_optimistic and self._count < config.seen_enough)
        own = [history.asked.get(self._number, (0.0, 0.0)) for history in histories]
        return [max((prior * known + total) / (prior + count), least) for total, count in own]

    def brought(self, history: DraftHistory, tokens: float) -> None:
        """Records the tokens that asking for a sequence has brought."""
        config = self._config
        total, count = history.asked.get(self._number, (0.0, 0.0))
        kept = 1 - 2 / config.own_memory
        history.asked[self._number] = kept * total + tokens, kept * count + 1
        self._count = min(self._count + 1, config.pool_memory)
        num = max(min(self._count, config.own_memory), config.prior_outcomes)
        self._worth += (tokens - self._worth) / num

    def pass_time(self, seconds: float) -> None:
        """Lets evidence age by `seconds`."""
        self._count *= max(1 - seconds / self._config.forget_seconds / 4, 0.5)


class Asking:
    """Decides which drafts are asked first.

    Args:
        drafts: The drafts.
        bank: Bank that pays for trials.
        costs: Cost model.
        config: Numbers of the policy.

    Attributes:
        each: Estimates of what asking each draft is worth.
        advantage: Tokens of a step with drafts that are asked first, divided by plain decoding's in
            the same time.
    """

    def __init__(
        self, drafts: Sequence[DraftKind], bank: Bank, costs: CostModel, config: ControllerConfig
    ) -> None:
        self.each = [AskedFirst(number, config) for number in range(len(drafts))]
        self.advantage = 1.0
        self._drafts, self._bank, self._costs, self._config = drafts, bank, costs, config

    def pays(
        self, candidates: Candidates, limits: Sequence[int], is_drafting: Sequence[bool]
    ) -> dict[int, bool]:
        """Decides which drafts are asked, by number of each draft that is asked first and has
        sequences. Sets `advantage`.
        """
        bank, batch, asked, brought = self._bank, len(candidates), {}, 0.0
        for number, kind in enumerate(self._drafts):
            pairs = zip(candidates, limits, strict=True)
            own = [one.history for one, limit in pairs if limit and one.history.chosen == number]
            if kind.is_asked_first and own:
                cost = self._costs.draft(number, len(own), 1) * batch / bank.plain_seconds
                worth = sum(self.each[number].worth(own, bank.has_any))
                margin = 1.0 if is_drafting[number] else self._config.margin
                asked[number] = bank.is_full or worth > margin * cost
                brought += worth * asked[number]
        self.advantage = 1 + brought / batch
        return asked
