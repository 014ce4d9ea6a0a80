"""Measures accept lengths of drafts on text that the target wrote greedily.

Chains and trees are walked like in a server.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.trees.draft_tree import DraftTree
from foredraft.trees.tree_building import BeamTree
from training.draft.heads import DraftHead, Eagle3Head
from training.draft.target import Target
from training.draft.unroll import DraftInputs, unroll

ROWS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The measured acceptance of a draft.

    Attributes:
        length: Mean number of tokens per verification, the target's own token included.
        verifies: Number of verifications counted.
        depths: Share of verifications that accepted a token at depth d, given that depth d - 1 was
            accepted; d = 1, 2, ...
    """

    length: float
    verifies: int
    depths: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for a report."""
        return {
            "accept_length": round(self.length, 4),
            "verifies": self.verifies,
            "acceptance_by_depth": [round(value, 4) for value in self.depths],
        }


def summarize(accepted: list[int], steps: int) -> Acceptance:
    """Computes statistics from the number of drafted tokens that each verification accepted."""
    count = len(accepted)
    reached = [sum(value >= depth for value in accepted) for depth in range(steps + 1)]
    depths = tuple(reached[d] / max(1, reached[d - 1]) for d in range(1, steps + 1))
    return Acceptance(1 + sum(accepted) / max(1, count), count, depths)


def walk(accepted_at: list[int], root: int) -> list[int]:
    """Returns the number of accepted tokens of each verification of one sequence.

    Args:
        accepted_at: At index i, number of drafted tokens that match when the newest token is number
            i + 1 (slot i drafts).
        root: Number of the first newest token.
    """
    taken = []
    while root - 1 < len(accepted_at):
        taken.append(accepted_at[root - 1])
        root += taken[-1] + 1
    return taken


@torch.no_grad()
def measure(
    head: DraftHead,
    target: Target,
    heldout: Mapping[str, Tensor],
    prompt: int,
    depth: int,
    tree: tuple[int, int] | None,
) -> tuple[dict[str, Acceptance], dict[str, Acceptance]]:
    """Measures accept lengths by domain, of chains and of trees.

    Args:
        heldout: Texts that the target wrote, by domain, int64 [n, T].
        prompt: Number of tokens of each prompt.
        depth: Number of drafted tokens of a chain, and of levels of a tree.
        tree: Number of beams of a level, and of rows with the root; None measures only chains.
    """
    chains: dict[str, Acceptance] = {}
    trees: dict[str, Acceptance] = {}
    embed_weight, weight = target.embed_weight, target.output_weight
    for domain, texts in heldout.items():
        chain_counts: list[int] = []
        tree_counts: list[int] = []
        for tokens in texts.split(ROWS_AT_ONCE):
            hidden, captured = target.features(tokens, head.shape.aux_layers)
            inputs = DraftInputs(F.embedding(tokens, embed_weight), hidden, captured)
            chain_counts += head_chain(head, inputs, tokens, weight, prompt, depth)
            if tree:
                tree_counts += head_tree(
                    head, inputs, tokens, embed_weight, weight, prompt, depth, *tree
                )
        chains[domain] = summarize(chain_counts, depth)
        if tree:
            trees[domain] = summarize(tree_counts, depth)
    return chains, trees


@torch.no_grad()
def head_chain(
    head: DraftHead,
    inputs: DraftInputs,
    tokens: Tensor,
    output_weight: Tensor,
    prompt: int,
    steps: int,
) -> list[int]:
    """Returns the number of accepted tokens of every verification of chains of `steps` tokens.

    A drafted token matters only while all before it were right, so its inputs are the text's own
    tokens and one unrolled pass gives every chain.

    Args:
        head: The head.
        inputs: Embeddings and features of the sequences.
        tokens: The sequences [B, T], greedy from token `prompt` on.
        output_weight: The target's output head.
        prompt: Number of tokens of each prompt.
        steps: Number of drafted tokens of a chain.
    """
    right = []
    for step, (_, logits) in enumerate(unroll(head, inputs, output_weight, steps)):
        best = to_target_ids(head, logits.argmax(-1))
        right.append(best == tokens[:, step + 2 : step + 2 + best.shape[1]])
    matched = torch.stack(right).cumprod(0).sum(0)
    return [value for row in matched.tolist() for value in walk(row, prompt)]


def to_target_ids(head: DraftHead, ids: Tensor) -> Tensor:
    """Converts draft token ids to target token ids."""
    return ids + head.d2t[ids] if isinstance(head, Eagle3Head) else ids


@torch.no_grad()
def head_tree(
    head: DraftHead,
    inputs: DraftInputs,
    tokens: Tensor,
    embed_weight: Tensor,
    output_weight: Tensor,
    prompt: int,
    steps: int,
    topk: int,
    num_draft_tokens: int,
) -> list[int]:
    """Returns the number of accepted tokens of every verification of dynamic trees.

    See `head_chain` for the arguments.

    The committed slots hold the target's features; drafted rows attend to them, to their ancestors
    and to themselves.
    """
    batch, length = tokens.shape
    slots = length - 1
    index = torch.arange(slots, device=tokens.device)
    features = head.fuse(inputs.hidden, inputs.captured)[:, :slots]
    x, residual = head.prepare(inputs.embeds[:, 1:], features, index)
    q, prefix_keys, prefix_values = head.project(x, index)
    mixed = F.scaled_dot_product_attention(q, prefix_keys, prefix_values, is_causal=True)
    outputs = head.complete(mixed, residual)
    token_map = None
    if isinstance(head, Eagle3Head):
        token_map = torch.arange(len(head.d2t), device=tokens.device) + head.d2t
    rows = torch.arange(batch, device=tokens.device)

    def draft(roots: Tensor) -> list[DraftTree]:
        tree = BeamTree(batch, steps, topk, num_draft_tokens)
        beam_features = outputs[rows, roots - 1][:, None]
        keys, values = prefix_keys, prefix_values
        visible = (index < roots[:, None])[:, None].expand(batch, topk, slots)
        for level in range(steps):
            logits = head.logits(beam_features, output_weight).float()
            beam_tokens, beams = tree.expand(logits, token_map)
            if level == steps - 1:
                break
            beam_features = beam_features.gather(
                1, beams[..., None].expand(-1, -1, beam_features.shape[-1])
            )
            positions = (roots + level)[:, None].expand(batch, topk)
            embeds = F.embedding(beam_tokens, embed_weight).to(beam_features.dtype)
            x, residual = head.prepare(embeds, beam_features, positions)
            q, k, v = head.project(x, positions)
            keys, values = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
            mask = torch.cat((visible, tree.ancestor_rows()), dim=2)[:, None]
            mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            beam_features = head.complete(mixed, residual)
        return tree.finish()

    return _walk_trees(draft, tokens, prompt, steps)


def _walk_trees(
    draft: Callable[[Tensor], list[DraftTree]], tokens: Tensor, prompt: int, steps: int
) -> list[int]:
    """Drafts for all sequences at once and moves each past the accepted tokens, in turns.

    Ends when no sequence has room for a whole tree.
    """
    text = tokens.tolist()
    end = tokens.shape[1] - steps
    roots = [prompt] * len(text)
    accepted = []
    while min(roots) < end:
        trees = draft(torch.tensor(roots, device=tokens.device).clamp(max=end - 1))
        for row, tree in enumerate(trees):
            if roots[row] >= end:
                continue
            matched = _match(tree, text[row][roots[row] + 1 :])
            accepted.append(matched)
            roots[row] += matched + 1
    return accepted


def _match(tree: DraftTree, text: list[int]) -> int:
    node, depth = -1, 0
    while True:
        children = (
            child
            for child, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True))
            if parent == node and token == text[depth]
        )
        found = next(children, None)
        if found is None:
            return depth
        node, depth = found, depth + 1
