"""The bank that pays for trials: time that drafting may lose, a small share of all time."""

from verify_service.controller.config import ControllerConfig


class Bank:
    """Holds time in units of plain steps of the current batch, so that a large batch may lose as
    many steps as a small one.

    While the bank is not empty, drafts are rated a little better than they seem. When it is empty,
    nothing is drafted but what is known to pay.

    Args:
        config: Numbers of the policy.
        plain_seconds: Seconds of a plain step.

    Attributes:
        plain_seconds: Seconds of a plain step of the current batch.
        is_suspended: Whether trials are suspended.
    """

    def __init__(self, config: ControllerConfig, plain_seconds: float) -> None:
        self.plain_seconds, self.is_suspended = plain_seconds, False
        self._config, self._steps, self._credit = config, config.bank_steps, 2 * config.bank_steps

    @property
    def has_any(self) -> bool:
        """Whether drafts may be rated better than they seem."""
        return self._steps > 0 and not self.is_suspended

    @property
    def is_full(self) -> bool:
        """Whether the bank is full, so that it cannot earn more."""
        return self._steps >= self._config.bank_steps

    def affords(self, loss: float) -> bool:
        """Returns whether the bank holds `loss` seconds, or is full."""
        return self.is_full or self._steps * self.plain_seconds >= loss

    def set_plain_seconds(self, seconds: float) -> None:
        """Sets the seconds of a plain step, before each plan.

        Ends a suspension once the bank holds a step again.
        """
        self.plain_seconds = seconds
        self.is_suspended &= not self.affords(seconds)

    def lend(self, is_known: bool) -> None:
        """Adds a credit once, beyond the bank's capacity, so that the first trials are not cut off
        by bad luck; takes back what is left once `is_known` what drafts bring.
        """
        self._steps, self._credit = self._steps + self._credit, 0.0
        self._steps = min(self._steps, self._config.bank_steps if is_known else self._steps)

    def record_drafted(self, cost: float, tokens_worth: float, is_first: bool) -> None:
        """Records a drafted step.

        Args:
            cost: Seconds of the step.
            tokens_worth: Seconds that plain steps take for its tokens.
            is_first: Whether only drafts that are asked first drafted. Their gains are rare and
                large, and must pay for many proposals that bring nothing, so the bank holds more.
        """
        loss = cost - tokens_worth - self._config.bank_share * cost
        self.pay(loss, self._config.seen_enough * is_first)

    def record_plain(self, cost: float, beyond: float = 0.0) -> None:
        """Records a plain step.

        Args:
            cost: Seconds of the step.
            beyond: Seconds that a trial beside the step has added to it.
        """
        self.pay(beyond - self._config.bank_share * cost)

    def pay(self, seconds: float, most: float = 0.0) -> None:
        """Takes a loss of `seconds` from the bank; a negative loss adds to it, up to `most` steps
        or a usual bank's. It owes a step at most.
        """
        most = max(most, self._config.bank_steps, self._steps)
        self._steps = max(min(self._steps - seconds / self.plain_seconds, most), -1.0)
        self.is_suspended |= self._steps <= 0 < seconds
