"""Sizes of a draft's fixed-shape steps, from the verifier's attach and the draft model."""

from draft_service.drafters.method import MethodSizes
from draft_service.drafters.tree_limits import TreeLimits
from draft_service.steps.hand_on import HandedOn
from draft_service.steps.records import DraftShape
from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import AttachRefused
from foredraft.transport.device_exchange import DraftExchange


def draft_shape(
    attach: draft_pb2.AttachRequest, limits: TreeLimits, sizes: MethodSizes
) -> DraftShape:
    """Returns the sizes of fixed-shape steps for one verifier.

    Args:
        attach: The verifier's sizes.
        limits: Limits of trees.
        sizes: Sizes of the draft model.
    """
    steps, topk, nodes = limits
    # A verifier's page table has room for a tree behind the longest sequence. A sequence may run
    # one step past its end before the verifier's host knows of it; that takes room for another.
    max_keys = attach.max_context + 2 * (nodes + 2)
    return DraftShape(
        num_steps=steps,
        topk=topk,
        num_nodes=nodes,
        num_rows=steps + 1,
        max_slots=attach.max_batch,
        max_pages=-(-max_keys // attach.page_size),
        vocab=sizes.num_columns,
        feature_size=sizes.feature_size,
        is_windowed=any(window is not None for window in sizes.config.windows),
        shift=sizes.shift,
    )


def handed_on(exchange: DraftExchange | None, shape: DraftShape) -> HandedOn | None:
    """Returns the tensors of an exchange that the graphs use; None without an exchange.

    Raises:
        AttachRefused: The exchange is for steps of another shape.
    """
    if exchange is None:
        return None
    accepted, trees = tuple(exchange.accepted.shape), tuple(exchange.trees.shape)
    batch = shape.max_slots + 1
    if accepted != (batch, 1 + shape.num_rows) or trees != (batch, 2, shape.num_nodes):
        raise AttachRefused(
            "arena.tensors", f"tokens {accepted} and trees {trees}, not for {shape}"
        )
    return HandedOn(exchange.accepted, exchange.trees, exchange.first_row, exchange.drafted)
