"""Block drafters under test, and checks that hold for all of them on any device."""

from pathlib import Path
from typing import Any

import numpy as np

from draft_service.drafters.heads import HeadDrafter
from foredraft.config.services import DraftConfig
from testing.block_drafts import BlockReference, parallel_chain, tiny_block
from testing.draft_heads import TinyHead, save_head
from testing.head_verifier import Verifier, attached, text
from testing.plan_attention import PlanAttention

SPECULATORS = {"layout": "speculators"}
SLIDING = {"num_layers": 3, "window": 6, "sliding": (0, 2)}
KINDS: dict[str, tuple[TinyHead, dict[str, Any]]] = {
    "dflash": (tiny_block("DFLASH", 1), {}),
    "dflash-one-layer": (tiny_block("DFLASH", 2, num_layers=1, block=8, ids=(1,)), {}),
    "dflash-speculators": (
        tiny_block("DFLASH", 3, draft_vocab=80, own_embedding=True, **SPECULATORS),
        {},
    ),
    "dflash-sliding": (tiny_block("DFLASH", 4, **SLIDING), {}),
    "dflash-sliding-causal": (
        tiny_block("DFLASH", 5, **SLIDING, **SPECULATORS),
        {"is_window_causal": True},
    ),
    "dflash-deepspec": (tiny_block("DFLASH", 6, layout="deepspec"), {"from_anchor": True}),
    "dspark": (tiny_block("DSPARK", 7, confidence="both", layout="deepspec"), {}),
    "dspark-gated": (tiny_block("DSPARK", 8, markov="gated", confidence="hidden"), {}),
    "dspark-rnn": (tiny_block("DSPARK", 9, markov="rnn", draft_vocab=80, **SPECULATORS), {}),
    "dspark-modelopt": (tiny_block("DSPARK", 10, layout="modelopt"), {}),
}


def load(head: TinyHead, target: Path, folder: Path, **flags: Any) -> HeadDrafter:
    """Saves a head in `folder`, and loads it as a draft service with these flags does."""
    return HeadDrafter.load(
        DraftConfig(
            model_path=str(target),
            speculative_algorithm=head.algorithm,
            speculative_draft_model_path=str(save_head(head, folder)),
            **flags,
        )
    )


def load_on_cpu(head: TinyHead, target: Path, folder: Path) -> HeadDrafter:
    """Loads a head on one thread; its attention reads plans, as a GPU's does."""
    drafter = load(head, target, folder, device="cpu", num_threads=1)
    drafter.attention = PlanAttention()
    return drafter


def limits(steps: int) -> tuple[int, int, int]:
    return (steps, 1, steps + 1)


def chain_of(tree: tuple[tuple[int, ...], tuple[int, ...]]) -> list[int]:
    tokens, parents = tree
    assert parents == tuple(range(-1, len(tokens) - 1))
    return list(tokens)


def states_of(verifier: Verifier, slot: int) -> np.ndarray:
    return verifier.hidden(slot)[: len(verifier.tokens[slot]) - 1].double().numpy()


def check_batch_that_grows(
    drafter: HeadDrafter, reference: BlockReference, target: Path, is_prepared: bool = False
) -> None:
    """Checks that chains of sequences of many lengths equal the reference's over several rounds."""
    longest = reference.block - 1 + reference.from_anchor
    assert drafter.info().limits.num_steps == longest
    shapes = [longest, 1, 2, longest, 3, longest]
    lengths = [2, 3, 4, 9, 17, 30]
    with attached(drafter, target, is_prepared, limits=drafter.info().limits) as verifier:
        for round_number in range(3):
            messages = []
            for slot, steps in enumerate(shapes):
                count = lengths[slot] if round_number == 0 else 1 + (slot + round_number) % steps
                new = text(10 * round_number + slot, count)
                messages.append(verifier.news(slot, new, limits(steps)))
            trees = verifier.step(*messages)
            for slot, steps in enumerate(shapes):
                bonus, states = verifier.tokens[slot][-1], states_of(verifier, slot)
                expected = reference.chain(bonus, states, steps)
                assert chain_of(trees[slot]) == expected, (round_number, slot)


def check_peagle(
    drafter: HeadDrafter, head: TinyHead, target: Path, is_prepared: bool = False
) -> None:
    """Checks that P-EAGLE's chains equal the reference's over several rounds."""
    most = drafter.info().limits
    with attached(drafter, target, is_prepared, limits=most) as verifier:
        for round_number in range(3):
            shapes = [7, 1, 4]
            messages = [
                verifier.news(slot, text(9 * round_number + slot, 6 + slot), limits(steps))
                for slot, steps in enumerate(shapes)
            ]
            trees = verifier.step(*messages)
            for slot, steps in enumerate(shapes):
                tokens, states = verifier.tokens[slot], states_of(verifier, slot)
                expected = parallel_chain(head, target, tokens, states, steps)
                assert chain_of(trees[slot]) == expected, (round_number, slot)
