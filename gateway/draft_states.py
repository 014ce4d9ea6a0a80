"""Derives each draft's present state from counters alone.

So it works with every controller and for verifiers on other machines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOADING = "loading"  # never attached since the verifier's start
LOST = "lost"  # was attached
DRAFTING = "drafting"
SUSPENDED = "suspended"  # plain decoding is faster now: next to no step drafts
UNMATCHED = "unmatched"  # the draft is asked, but has nothing to propose
IDLE = "idle"  # attached; too few running requests allow drafting
ATTACHED = "attached"  # nothing more is known: no metrics page answers

ENOUGH = 32  # least number of verifications to derive a state from, where there are so many
FEW = 8  # with fewer, none of them with a tree, the draft counts as idle
WINDOW_SECONDS = 30.0  # longest time over which verifications are counted
TRIALS = 0.1  # largest share of verifications with a tree while drafting is suspended
EMPTY = 0.5  # most tokens per step proposed by a draft that finds nothing

# Counters and gauges by the name of the draft, as the metrics pages have them.
AVAILABLE = "foredraft_draft_available"
ATTACHES = "foredraft_draft_attaches_total"
VERIFIES = "foredraft_verifies_total"
OFF = "foredraft_speculation_off_verifies_total"
TREES = "foredraft_drafts_total"
ACCEPTED = "foredraft_accepted_tokens_total"
ASKED = "foredraft_drafter_steps_total"
PROPOSED = "foredraft_drafter_proposed_tokens_total"
NAMES = frozenset({AVAILABLE, ATTACHES, VERIFIES, OFF, TREES, ACCEPTED, ASKED, PROPOSED})


@dataclass(frozen=True, slots=True)
class Sample:
    """Metrics of all drafts at one time.

    Attributes:
        time: Monotonic, in seconds.
        values: Values by metric and draft, added up over all pages.
        verifiers: Number of verifiers that report each draft.
    """

    time: float
    values: Mapping[str, Mapping[str, float]]
    verifiers: Mapping[str, int]

    def of(self, metric: str, draft: str) -> float:
        """Returns a metric of one draft; 0 where no page has it."""
        return self.values.get(metric, {}).get(draft, 0.0)


def describe(draft: str, samples: Sequence[Sample], is_attached: bool) -> dict[str, Any]:
    """Returns a draft's state, with the figures that it was derived from.

    Args:
        draft: Name of the draft.
        samples: Figures of the last seconds, the newest last; at least one.
        is_attached: Whether the verifiers last reported the draft as attached; used where no page
            tells.
    """
    newest = samples[-1]
    verifiers = newest.verifiers.get(draft, 0)
    if not verifiers:
        return {"name": draft, "state": ATTACHED if is_attached else LOST}
    told = {
        "name": draft,
        "attached": int(newest.of(AVAILABLE, draft)),
        "verifiers": verifiers,
    }
    if not told["attached"]:
        return {**told, "state": LOST if newest.of(ATTACHES, draft) else LOADING}
    before = _window_start(draft, samples)
    verifies = _may_draft(newest, draft) - _may_draft(before, draft)
    trees, accepted, asked, proposed = (
        newest.of(name, draft) - before.of(name, draft)
        for name in (TREES, ACCEPTED, ASKED, PROPOSED)
    )
    told |= {"seconds": newest.time - before.time, "verifies": verifies, "trees": trees}
    if trees > 0:
        told["tokens_per_tree"] = 1 + accepted / trees
    if trees > TRIALS * verifies:
        state = DRAFTING
    elif verifies < FEW:
        state = IDLE
    elif asked >= FEW and proposed <= EMPTY * asked:
        state = UNMATCHED
    else:
        state = SUSPENDED
    return {**told, "state": state}


def _may_draft(sample: Sample, draft: str) -> float:
    return sample.of(VERIFIES, draft) - sample.of(OFF, draft)


def _window_start(draft: str, samples: Sequence[Sample]) -> Sample:
    """Returns the newest sample that has enough verifications after it.

    Where there is none, it is the oldest sample that can be compared.
    """
    newest = found = samples[-1]
    for sample in reversed(samples):
        is_restarted = sample.of(VERIFIES, draft) > found.of(VERIFIES, draft)
        if is_restarted or newest.time - sample.time > WINDOW_SECONDS:
            break
        found = sample
        if _may_draft(newest, draft) - _may_draft(found, draft) >= ENOUGH:
            break
    return found
