"""Capabilities that a draft reports to the verifier in the handshake."""

from collections.abc import Iterable
from dataclasses import dataclass

from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.algorithms import Algorithm


@dataclass(frozen=True, slots=True)
class DraftCapabilities:
    """Properties of a draft that the verifier must know.

    Attributes:
        layers: Layers whose input residual stream the draft reads; empty for the state after the
            final norm, None for a draft that reads no hidden states.
        follows_on_device: Whether its steps can stay on the GPU, each behind a step of the target.
        is_free: Whether reading and proposing cost it next to nothing. It is then synced and asked
            in every step, and its proposal decides how much is worth verifying.
        uses_pages: Whether it keeps KV on the verifier's pages, and catches up within a budget;
            other drafts read every token of a sequence.
    """

    layers: tuple[int, ...] | None = None
    follows_on_device: bool = False
    is_free: bool = False
    uses_pages: bool = False

    @classmethod
    def of(cls, info: draft_pb2.GetDraftInfoResponse) -> "DraftCapabilities":
        """Reads the capabilities from a draft's info."""
        return cls(
            layers=tuple(info.hidden.layers) if info.HasField("hidden") else None,
            follows_on_device=info.device_steps,
            is_free=info.cost == draft_pb2.DRAFT_COST_FREE if info.cost else not info.weight_bytes,
            uses_pages=info.uses_pages,
        )

    @classmethod
    def expected(cls, algorithm: Algorithm) -> "DraftCapabilities":
        """Returns the capabilities to expect of an algorithm's draft that has not answered yet.

        Sizes that are fixed at start depend on them.
        """
        return cls(
            layers=() if algorithm.reads_hidden else None,
            follows_on_device=algorithm.has_model,
            is_free=not algorithm.has_model,
            uses_pages=algorithm.has_model,
        )


def read_final_states(each: Iterable[DraftCapabilities]) -> bool:
    """Returns whether one of the drafts reads states after the final norm."""
    return any(one.layers == () for one in each)


def layers_to_capture(each: Iterable[DraftCapabilities]) -> tuple[int, ...] | None:
    """Returns the layers that steps capture for drafts: all that any of them reads.

    It is empty where only states after the final norm are read, None where no hidden states are.
    """
    read = {one.layers for one in each if one.layers is not None}
    if not read:
        return None
    lists = sorted(layers for layers in read if layers)
    return lists[0] if len(lists) == 1 else tuple(sorted(set().union(*lists)))
