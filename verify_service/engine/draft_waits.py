"""How long a step waited for its drafts, and for how much."""

from collections.abc import Sequence

from verify_service.controller.messages import NO_WAIT, Wait
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.proposals import Proposals
from verify_service.scheduler.step_plan import DecodeSlot


def wait_for_drafts(
    drafts: Drafts,
    slots: Sequence[DecodeSlot],
    proposals: Proposals,
    seconds: float,
    unread: Sequence[int],
) -> Wait:
    """Returns a step's wait for its drafts.

    Args:
        drafts: The engine's drafts.
        slots: Sequences that decode in the step.
        proposals: The drafts' proposals.
        seconds: Seconds that passed before the target's part.
        unread: Tokens that each draft had to read first, beyond what a step commits.
    """
    asked: dict[int, list[int]] = {}
    for slot, number in zip(slots, drafts.proposers(slots), strict=True):
        if slot.max_tree_nodes:
            asked.setdefault(number, []).append(slot.max_tree_nodes)
    # Time of planning, which steps that follow on the device do not wait for.
    rest = max(seconds - max(proposals.waits.values(), default=0.0), 0.0)
    parts = []
    for number, waited in proposals.waits.items():
        one, nodes = drafts.each[number], asked.get(number)
        is_free = one.capabilities.is_free
        if not nodes or not (proposals.trees or is_free):
            continue
        levels = 1 if is_free else min(max(nodes), one.depth)
        wait = Wait(levels, len(nodes), waited + rest, lead=seconds, unread=unread[number])
        parts.append((number, wait))
    if not parts:
        return NO_WAIT._replace(lead=seconds)
    return Wait(
        levels=max(part.levels for _, part in parts),
        sequences=sum(part.sequences for _, part in parts),
        seconds=seconds,
        parts=tuple(parts),
        lead=seconds,
        unread=max(part.unread for _, part in parts),
    )
