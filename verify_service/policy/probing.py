"""When to try what does not seem to pay: a share of all time may be lost to finding out, and never much at once."""

# Of all time that trying may lose against plain decoding; on a GPU a trial is beside steps, and a little buys enough.
SHARE, PADDED_SHARE = 0.0125, 0.01
# Seconds that may be lost ahead, or owed.
MOST_SAVED, PADDED_MOST_SAVED = 0.03, 0.01
# Seconds that drafting may lose before it stops, whatever it is expected to bring; more where one step loses much.
STOP_LOSS, STOP_STEPS, MOST_STOP_LOSS = 0.08, 3, 0.2
STOP_SECONDS = 0.25  # for which it stops
ALLOWED = 0.01  # of drafting's time that may be lost without being counted
FORGIVEN = 0.1  # of the time of plain steps: what was lost before is no sign of what is lost now
# Drafting steps at least between plain ones that show what drafting is worth; on a GPU the return to drafting costs more.
CHECK_STEPS, PADDED_CHECK_STEPS = 48, 128
CHECK_COST = 300  # of these for every plain step that is lost by such a check
PATIENCE = 8  # plans that a trial goes on for at most until there is an outcome


class Probing:
    """Keeps account of what trying cost. Times are seconds of decoding steps, which is also the clock.

    Args:
        is_padded: Whether steps are padded, as on a GPU.

    Attributes:
        now: The clock.
    """

    def __init__(self, is_padded: bool = False) -> None:
        self._check_steps = PADDED_CHECK_STEPS if is_padded else CHECK_STEPS
        self._share = PADDED_SHARE if is_padded else SHARE
        self._most_saved = PADDED_MOST_SAVED if is_padded else MOST_SAVED
        self.now = 0.0
        self._balance = 0.0
        self._lost = 0.0
        self._stopped_until = 0.0
        self._steps_since_check = 0
        self._waiting = 0
        self._lost_by_trial = 0.0  # seconds, by the last ones

    @property
    def is_stopped(self) -> bool:
        """Whether drafting lost so much lately that it rests."""
        return self.now < self._stopped_until

    def has_time(self, is_urgent: bool = False) -> bool:
        """Whether there is time to lose; see `may_try`."""
        return self._balance >= (-self._most_saved if is_urgent else 0) and not self.is_stopped

    def may_try(self, is_urgent: bool = False) -> bool:
        """Whether there is time to lose, or a trial goes on because nothing came of it yet; asked once per plan.

        Args:
            is_urgent: The last trial went so well that some debt may be made.
        """
        if self._waiting:
            self._waiting -= 1
            return True
        if not self.has_time(is_urgent):
            return False
        self._waiting = PATIENCE
        return True

    def must_check(self, advantage: float) -> bool:
        """Whether a step without drafts is due, to see what it takes now.

        Args:
            advantage: Of drafting, as a factor.
        """
        return self._steps_since_check >= self._check_steps + CHECK_COST * (advantage - 1)

    def plain_step(self, seconds: float, loss: float = 0.0) -> None:
        """Takes the time of a step without drafts, and what of it is owed to drafts before it or beside it."""
        self.now += seconds
        self._lost = max(self._lost - FORGIVEN * seconds, 0.0)
        self._balance = min(
            self._balance + self._share * seconds - min(loss, self._most_saved), self._most_saved
        )
        self._steps_since_check = 0

    def owe(self, loss: float) -> None:
        """Takes what trials are taken to have cost in steps that say nothing else."""
        self._balance = max(self._balance - loss, -self._most_saved)

    def pass_time(self, seconds: float) -> None:
        """Takes the time of a step that says nothing."""
        self.now += seconds

    def drafted_step(self, seconds: float, plain_seconds: float, was_trial: bool) -> bool:
        """Takes the time of a step with drafts, and the time that its tokens would have taken without.

        Returns:
            Whether drafting has lost so much that what it is expected to bring must be wrong: it rests then.
        """
        self.now += seconds
        self._waiting = 0
        self._steps_since_check += 1
        loss = seconds - plain_seconds
        owed = loss
        if was_trial:
            # One hiccup must not keep drafting off for a minute; if it comes again, it is none.
            owed = min(loss, max(2 * self._lost_by_trial, self._most_saved))
            self._lost_by_trial = max(loss, self._lost_by_trial / 2)
        self._balance = min(self._balance + self._share * seconds - owed, self._most_saved)
        if was_trial:
            return False
        # What drafting is believed to bring is not what pays for trials.
        self._balance = max(self._balance, -self._most_saved)
        self._lost = max(0.0, self._lost + loss - ALLOWED * seconds)
        if self._lost <= min(max(STOP_LOSS, STOP_STEPS * loss), MOST_STOP_LOSS):
            return False
        self._lost = self._balance = 0.0
        self._stopped_until = self.now + STOP_SECONDS
        return True
