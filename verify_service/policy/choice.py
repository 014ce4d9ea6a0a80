"""Which of several drafts drafts for a sequence: the one with the most tokens per second, as far as was measured.

What a draft that was not chosen would bring is found out by asking it now and then: its proposals are not verified but judged by
the tokens that come.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from verify_service.policy.step_time import StepTimes

MEMORY = 16  # outcomes that a sequence's estimate of a draft rests on
POOL_MEMORY = 64  # and that of all sequences
PRIOR_OUTCOMES = 2.0  # that all sequences' weigh in one's own
FIRST_ACCEPTED, FIRST_NODES = 1.0, 3.0  # of a draft before anything was seen
MARGIN = 1.05  # by which another draft must be better before a sequence is given to it
# Two of the other draft for this sequence, the first of which counts a little less.
LEAST_OUTCOMES = 1.9
STAY = 6  # outcomes of a sequence between two changes
# Of one answer in what asking costs, and of one that came sooner.
TIME_WEIGHT, SOONER_WEIGHT = 0.2, 0.4
# Factor and seconds by which one answer may lie above what is known.
MOST_SLOWER, HICCUP = 3.0, 2e-3
FORGIVEN = 0.95  # kept, at each trial, of what waiting took beyond the draft's own time
SHARE = 0.01  # of all time that trials may take
TRIAL_STEPS = 2  # between two of them at least


@dataclass(slots=True)
class Outcomes:
    """What proposals of one draft brought, earlier ones counting less.

    Attributes:
        count: Proposals.
        nodes: That were worth verifying, in sum.
        accepted: Of these, in sum.
    """

    count: float = 0.0
    nodes: float = 0.0
    accepted: float = 0.0

    def add(self, nodes: float, accepted: float, memory: int) -> None:
        """Takes another proposal, which may be empty."""
        kept = 1 - 1 / memory
        self.count = kept * self.count + 1
        self.nodes = kept * self.nodes + nodes
        self.accepted = kept * self.accepted + accepted


@dataclass(slots=True)
class ChoiceHistory:
    """A sequence's.

    Attributes:
        chosen: Number of its draft.
        drafts: What each brought to it.
        stay: Outcomes until its draft may be changed.
    """

    chosen: int
    drafts: list[Outcomes] = field(default_factory=list)
    stay: int = 0


class _Asking:
    """What asking one draft costs: its own time by the number of sequences asked for, and what waiting takes beyond."""

    def __init__(self) -> None:
        self.beyond = 0.0
        self.whole = 0.0  # seconds of the newest answer, with all that the draft had to read first
        self._own: dict[int, float] = {}  # by the bits of the number

    def own(self, sequences: int) -> float:
        """Seconds of the draft itself; of the nearest number that was seen, 0 before any."""
        if not self._own:
            return 0.0
        size = sequences.bit_length()
        return self._own[min(self._own, key=lambda seen: abs(seen - size))]

    def answered(self, sequences: int, seconds: float) -> None:
        """Takes the draft's own time for an answer."""
        size = sequences.bit_length()
        self._own[size] = _towards(self._own.get(size, seconds), seconds)

    def waited(self, sequences: int, seconds: float) -> None:
        """Takes what a step waited."""
        self.beyond = _towards(self.beyond, max(seconds - self.own(sequences), 0.0))


class DraftChoice:
    """Belongs to the engine's thread.

    Args:
        num_drafts: In the order of preference while nothing is known.
        times: Of the target's steps.
    """

    def __init__(self, num_drafts: int, times: StepTimes) -> None:
        self._times = times
        self._pools = [Outcomes() for _ in range(num_drafts)]
        self._asking = [_Asking() for _ in range(num_drafts)]
        self._now = 0.0
        self._steps = 0
        self._next_trial = [(0, 0.0)] * num_drafts  # not before this step and time

    def begin(self, available: Sequence[bool], batch: int) -> ChoiceHistory:
        """The history of a new sequence, which begins with the draft that is best for others.

        One that nobody has tried yet would seem to cost nothing; it is begun with only where no other is known.
        """
        history = ChoiceHistory(0, [Outcomes() for _ in self._pools])
        first = next((draft for draft, is_there in enumerate(available) if is_there), 0)
        known = [
            is_there and (draft == first or pool.count >= LEAST_OUTCOMES)
            for draft, (is_there, pool) in enumerate(zip(available, self._pools, strict=True))
        ]
        history.chosen = first
        history.chosen = self._best(history, known, batch)
        return history

    def choose(self, history: ChoiceHistory, available: Sequence[bool], batch: int) -> int:
        """The draft of a sequence's next step; one that is not available only where none is."""
        current = history.chosen
        best = self._best(history, available, batch)
        if best == current or not any(available):
            return current
        if available[current]:
            is_known = history.drafts[best].count >= LEAST_OUTCOMES
            if history.stay > 0 or not is_known:
                return current
            goodput = self.goodput(history, current, batch)
            if self.goodput(history, best, batch) <= MARGIN * goodput:
                return current
        history.chosen, history.stay = best, STAY
        return best

    def goodput(self, history: ChoiceHistory, draft: int, batch: int) -> float:
        """Tokens per second that are expected if all sequences were like this one and had this draft."""
        nodes, accepted = self._expected(history, draft)
        rows = 1 + nodes if self._times.is_padded else batch * (1 + nodes)
        fewer = int(rows)
        seconds = self._times.seconds(batch, fewer)
        seconds += (rows - fewer) * (self._times.seconds(batch, fewer + 1) - seconds)
        asking = self._asking[draft]
        return batch * (1 + accepted) / (seconds + asking.own(batch) + asking.beyond)

    def record(self, history: ChoiceHistory, draft: int, nodes: int, accepted: int) -> None:
        """Takes what a proposal brought: nodes verified, or worth it, and those that were right."""
        history.drafts[draft].add(nodes, accepted, MEMORY)
        self._pools[draft].add(nodes, accepted, POOL_MEMORY)
        if draft == history.chosen and history.stay > 0:
            history.stay -= 1

    def answered(self, draft: int, sequences: int, seconds: float, whole: float) -> None:
        """Takes the draft's own time for an answer with trees for so many sequences.

        Args:
            seconds: Had it read no more than what a step commits.
            whole: With all that it had to read.
        """
        asking = self._asking[draft]
        asking.answered(sequences, seconds)
        asking.whole = whole

    def waited(self, draft: int, sequences: int, seconds: float) -> None:
        """Takes what a step waited for proposals to so many sequences."""
        self._asking[draft].waited(sequences, seconds)

    def stepped(self, seconds: float) -> None:
        """A step is over."""
        self._steps += 1
        self._now += seconds

    def may_try(self, draft: int, sequences: int) -> bool:
        """Whether to ask a draft for so many sequences that are not given to it. If so, that counts as done."""
        step, seconds = self._next_trial[draft]
        if self._steps < step or self._now < seconds:
            return False
        asking = self._asking[draft]
        asking.beyond *= FORGIVEN
        cost = max(asking.own(sequences), asking.whole)
        self._next_trial[draft] = (self._steps + TRIAL_STEPS, self._now + cost / SHARE)
        return True

    def _best(self, history: ChoiceHistory, available: Sequence[bool], batch: int) -> int:
        best, most = history.chosen, 0.0
        for draft, is_available in enumerate(available):
            if is_available and (goodput := self.goodput(history, draft, batch)) > most:
                best, most = draft, goodput
        return best

    def _expected(self, history: ChoiceHistory, draft: int) -> tuple[float, float]:
        """Nodes and accepted ones of the next proposal."""
        pool, own = self._pools[draft], history.drafts[draft]
        weight = pool.count + PRIOR_OUTCOMES
        nodes = (pool.nodes + PRIOR_OUTCOMES * FIRST_NODES) / weight
        accepted = (pool.accepted + PRIOR_OUTCOMES * FIRST_ACCEPTED) / weight
        weight = own.count + PRIOR_OUTCOMES
        return (
            (own.nodes + PRIOR_OUTCOMES * nodes) / weight,
            (own.accepted + PRIOR_OUTCOMES * accepted) / weight,
        )


def _towards(known: float, seconds: float) -> float:
    # One answer that came late must not spoil the estimate; one that came sooner shows what is possible.
    weight = SOONER_WEIGHT if seconds < known else TIME_WEIGHT
    return known + weight * (min(seconds, MOST_SLOWER * known + HICCUP) - known)
