"""Block drafters by steps of fixed shape, run operation by operation: the chains that the ordinary
path gives.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from draft_service.drafters.graph_drafting import GraphSettings
from draft_service.drafters.heads import HeadDrafter
from foredraft.config.services import DraftConfig
from foredraft.transport.inline import InlineReader
from foredraft.transport.rows import RowFormat
from testing.block_cases import KINDS
from testing.draft_cases import SAMPLINGS, limits_of
from testing.draft_heads import save_head
from testing.head_verifier import Verifier, request_of, text
from testing.plan_attention import PlanAttention


def life(verifier: Verifier, steps: int, topk: int, seed: int) -> list[Any]:
    """Sequences that come, grow by few tokens and by many, wait, and leave."""
    rng = random.Random(seed)
    answers = []
    live: set[int] = set()
    for step in range(12):
        released = tuple(slot for slot in live if rng.random() < 0.1)
        live -= set(released)
        for slot in released:
            verifier._free += verifier.pages.pop(slot)
            del verifier.tokens[slot]
        messages = []
        for slot in rng.sample(range(6), rng.randrange(1, 7)):
            is_new = slot not in live
            count = rng.choice((2, 3, 9, 60)) if is_new else rng.choice((1, 1, 2, steps + 1, 7))
            if len(verifier.tokens.get(slot, ())) + count > 150:
                continue
            live.add(slot)
            asked = rng.randrange(1, steps + 1)
            # A smaller tree is cut out of the largest one there.
            shape = (asked, 1, asked + 1) if topk == 1 else (steps, topk, 12)
            wanted = shape if rng.random() < 0.8 else None
            words = text(1000 * seed + 10 * step + slot, count)
            messages.append(verifier.news(slot, words, wanted, SAMPLINGS[slot % 3]))
            if messages[-1].HasField("begin") and rng.random() < 0.3:
                messages[-1].begin.valid_from = 1
        answers.append(verifier.step(*messages, released=released))
    return answers


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("ordering", ["topk", "coupled"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_trees_as_by_the_ordinary_path(
    kind: str, ordering: str, topk: int, target: Path, tmp_path: Path
) -> None:
    head, _ = KINDS[kind]
    drafter = HeadDrafter.load(
        DraftConfig(
            model_path=str(target),
            speculative_algorithm=head.algorithm,
            speculative_draft_model_path=str(save_head(head, tmp_path)),
            num_threads=1,
            device="cpu",
        )
    )
    drafter.attention = PlanAttention()
    steps = drafter.info().limits.num_steps
    found = []
    for static in (False, True):
        drafter.graphs = GraphSettings(8, captures=False) if static else None
        limits = limits_of((steps, topk, 12 if topk > 1 else steps + 1))
        proposer, _ = drafter.attach(request_of(target, draft_sampling=ordering, limits=limits))
        row = RowFormat.of(drafter.info().hidden)
        proposer.hidden = InlineReader(row)
        proposer.prepare()
        found.append(life(Verifier(proposer, row.width), steps, topk, seed=len(kind)))
        proposer.close()
    assert sum(len(answer) for answer in found[0]) > 20
    assert found[0] == found[1]
