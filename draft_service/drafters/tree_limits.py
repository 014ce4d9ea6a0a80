"""How large a draft's trees may be: `TreeLimits`."""

from typing import NamedTuple

from foredraft.api.draft.v1 import draft_pb2


class TreeLimits(NamedTuple):
    """Limits of a tree.

    Attributes:
        steps: Number of levels.
        topk: Number of children of a node, and of nodes that a level continues.
        nodes: Number of nodes, without the root.
    """

    steps: int
    topk: int
    nodes: int

    @classmethod
    def of(cls, limits: tuple[int, int, int]) -> "TreeLimits":
        """Converts `SpeculationConfig.tree_limits`, whose tokens include the root."""
        steps, topk, tokens = limits
        return cls(steps, topk, tokens - 1)

    def asked(self, message: draft_pb2.TreeLimits) -> "TreeLimits":
        """Returns the limits that a message asks for; these where it names none."""
        steps, topk, nodes = self
        tokens = message.num_draft_tokens
        return TreeLimits(
            message.num_steps or steps, message.topk or topk, tokens - 1 if tokens else nodes
        )

    @property
    def message(self) -> draft_pb2.TreeLimits:
        """The limits as a message."""
        steps, topk, nodes = self
        return draft_pb2.TreeLimits(num_steps=steps, topk=topk, num_draft_tokens=nodes + 1)
