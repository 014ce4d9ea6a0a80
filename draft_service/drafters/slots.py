"""Checks of a step's messages that all drafters share."""

from collections.abc import Container

from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import InvalidRequest


def check_slots(request: draft_pb2.StepRequest, live: Container[int], max_batch: int) -> None:
    """Checks that slots are in range, named once, and either live or begun by this step.

    Args:
        request: The step.
        live: Slots in use, without those that the step releases.
        max_batch: Number of slots.

    Raises:
        InvalidRequest: A slot breaks a rule; the error names it.
    """
    seen: set[int] = set()
    for sequence in request.sequences:
        slot = sequence.slot
        if slot >= max_batch:
            raise InvalidRequest("slot", f"{slot} is not below max_batch {max_batch}")
        if slot in seen:
            raise InvalidRequest("slot", f"{slot} appears twice in one step")
        if slot not in live and not sequence.HasField("begin"):
            raise InvalidRequest("slot", f"{slot} is used without a begin")
        seen.add(slot)


def check_tokens(sequence: draft_pb2.SequenceStep, vocab_size: int, max_context: int) -> list[int]:
    """Returns the step's tokens as a list.

    Raises:
        InvalidRequest: A token is not in the vocabulary or lies beyond the longest context.
    """
    tokens = list(sequence.tokens)
    if tokens and max(tokens) >= vocab_size:
        raise InvalidRequest(
            "tokens",
            f"slot {sequence.slot}: {max(tokens)} is not in the vocabulary of {vocab_size}",
        )
    if sequence.position + len(tokens) > max_context:
        raise InvalidRequest(
            "tokens",
            f"slot {sequence.slot}: {len(tokens)} tokens from position {sequence.position} on "
            f"pass max_context {max_context}",
        )
    return tokens


def check_position(sequence: draft_pb2.SequenceStep, num_known: int) -> None:
    """Raises InvalidRequest if tokens between the known ones and the step's first are missing."""
    if sequence.position > num_known:
        raise InvalidRequest(
            "position",
            f"slot {sequence.slot}: {sequence.position} leaves a gap after the {num_known} "
            "tokens that are known",
        )
