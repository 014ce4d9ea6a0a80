"""Drafts, trees and sampling parameters for tests of drafters."""

from foredraft.api.draft.v1 import draft_pb2
from testing.draft_heads import TinyHead, tiny_head

KINDS: dict[str, TinyHead] = {
    "eagle": tiny_head("EAGLE", 1),
    "eagle-qwen2-two-layers": tiny_head(
        "EAGLE", 2, num_layers=2, architecture="Qwen2ForCausalLMEagle"
    ),
    "eagle3": tiny_head("EAGLE3", 3),
    "eagle3.1-qwen3": tiny_head(
        "EAGLE3",
        4,
        architecture="Qwen3ForCausalLMEagle3",
        fc_norm=True,
        norm_before_fc=True,
        norm_output=True,
    ),
    "mtp": tiny_head("MTP", 5),
}
# Steps, topk and tokens of a tree, the root included.
SHAPES = {"chain": (3, 1, 4), "tree": (3, 3, 9), "bushy": (2, 4, 30), "one": (1, 3, 4)}
SAMPLINGS = [
    {"top_p": 1.0},
    {"temperature": 0.9, "top_p": 1.0, "seed": 2**63 + 5},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 6},
]


def limits_of(shape: tuple[int, int, int]) -> draft_pb2.TreeLimits:
    """Returns the limits of a draft request."""
    steps, topk, tokens = shape
    return draft_pb2.TreeLimits(num_steps=steps, topk=topk, num_draft_tokens=tokens)
