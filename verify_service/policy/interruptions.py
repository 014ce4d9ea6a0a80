"""What new prompts cost beside decoding, while something is drafted and while nothing is, where steps else follow one another at once."""

import math

SETTLING = 2  # steps after one with prompts that are not as usual: the first is waited for, behind the second a draft reads
MEMORY = 16  # interruptions that what one costs rests on
FREQUENT_SECONDS = 1.0  # in which two thirds of how often they came are forgotten
FORGET_SECONDS = 30.0  # likewise of what they cost in the state that is not the present one, so that it is tried again
FREQUENT, QUIET_SECONDS = 10.0, 0.1  # in that time; and after which they may have ended
# Seconds, and times what is known, that one may cost more: a hiccup tells little.
MOST_MORE, MOST_TIMES = 4e-3, 3.0
START_MARGIN = 1.3  # times what they seem to cost, before drafting starts: how many come is luck
LEAST_SHARE = 0.1  # of the time that decoding is left with at least, as far as that is believed


class Interruptions:
    """Knows how many seconds an interruption loses, what its tokens are worth taken off, and how often one comes.

    What the target takes for the prompts themselves is not counted: it takes that in both states. An interruption is a step with
    prompts and the `SETTLING` steps behind it.
    """

    def __init__(self) -> None:
        # Seconds of an interruption while nothing is drafted, and while something is.
        self._lost = [0.0, 0.0]
        self._counts = [0, 0]
        self._events = self._tokens = 0.0  # lately
        self._since = 0.0  # seconds since the newest one
        self._open: tuple[bool, float] | None = None  # the newest one, which may not be over
        self._num_left = 0

    @property
    def is_settling(self) -> bool:
        """Whether the next step that only decodes belongs to an interruption."""
        return self._num_left > 0

    @property
    def is_frequent(self) -> bool:
        """Whether a trial would hardly be left alone for as long as it takes."""
        return self._events > FREQUENT and self._since < QUIET_SECONDS

    def begin(self, is_drafting: bool, lost: float | None) -> None:
        """A step had prompts.

        Args:
            lost: Seconds, without the target's for them; None where that is not to be learnt.
        """
        self._close()
        self._open = None if lost is None else (is_drafting, lost)
        self._num_left = SETTLING
        self._events += 1

    def settle(self, lost: float) -> None:
        """Takes what a step behind one with prompts lost, seconds."""
        self._num_left -= 1
        if self._open is not None:
            is_drafting, before = self._open
            self._open = is_drafting, before + lost
        if not self._num_left:
            self._close()

    def skip(self) -> None:
        """A step behind one with prompts tells nothing."""
        self._num_left = max(self._num_left - 1, 0)
        self._open = None

    def step(self, seconds: float, tokens: int) -> None:
        """Takes the length of any step, and the tokens of those who decoded."""
        kept = math.exp(-seconds / FREQUENT_SECONDS)
        self._events *= kept
        self._tokens = kept * self._tokens + tokens
        self._since += seconds

    def rate(self, rate: float, is_drafting: bool, is_start: bool = False) -> float:
        """Tokens per second of decoding, given those of steps that nothing interrupts.

        Args:
            is_start: Drafting would have to start.
        """
        lost = self._lost[is_drafting]
        if is_start:  # tokens that came beside a prompt may be worth more than all that was lost
            lost += (START_MARGIN - 1) * max(lost - min(self._lost[False], 0.0), 0.0)
        lost *= self._events / max(self._tokens, 1.0)
        return rate / max(1 + lost * rate, LEAST_SHARE)

    def _close(self) -> None:
        if self._open is None:
            return
        is_drafting, lost = self._open
        self._open = None
        known = self._lost[is_drafting]
        lost = min(lost, MOST_TIMES * max(known, 0.0) + MOST_MORE)
        self._counts[is_drafting] += 1
        known += (lost - known) / min(1 + self._counts[is_drafting], MEMORY)
        self._lost[is_drafting] = known
        # While nothing is drafted nobody is waited for, as far as is known; and drafting is tried again in time.
        other = not is_drafting
        least = known if other else 0.0
        kept = math.exp(-self._since / FORGET_SECONDS)
        self._lost[other] = least + kept * (self._lost[other] - least)
        self._since = 0.0
