"""The forwards of a warm-up launch every variant of attention's kernels that any forward within
reach does.
"""

import math
import random
from collections.abc import Hashable

import pytest
import torch

from foredraft.attention.base import AttentionBackend
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.paged_triton import TritonAttention
from foredraft.kernel_launch import few_variants
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import SequenceRows, build_batch
from foredraft.runner.warm_up import Reach, forwards_to_run
from foredraft.trees.draft_tree import DraftTree
from testing.kernel_variants import META, recorded_launches

PAGE = 16
SHAPES = {  # heads, KV heads, size of a head
    "llama-8b": (32, 8, 128),
    "llama-8b, 8 bits": (32, 8, 128),
    "smollm": (9, 3, 64),
    "qwen2-0.5b": (14, 2, 64),
    "gemma3-1b": (4, 1, 256),
    "all heads their own": (40, 40, 128),
}
REACHES = {
    "a draft": Reach(1024, 64, 100_000, cut_keys=False),
    "a target with trees": Reach(8192 + 64 * 32, 64, 100_000, 32),
    "small": Reach(300, 3, 700, 9),
}


# What each backend has been seen to need.
BACKENDS = {TritonAttention: 9, ExactAttention: 14}


def attend(
    attention: AttentionBackend,
    rows: list[SequenceRows],
    kv: PagedKV,
    num_heads: int,
    cut_keys: bool,
) -> None:
    batch = build_batch(rows, kv)
    head_dim = kv.data.shape[-1]
    queries = torch.empty(batch.num_rows, num_heads, head_dim, dtype=torch.bfloat16, device=META)
    out = torch.empty(batch.num_rows, num_heads * head_dim, dtype=torch.bfloat16, device=META)
    with few_variants(cut_keys):
        plan = attention.plan(batch, kv, (None,), num_heads // kv.num_kv_heads)
        attention.attend(plan, queries, 0, None, 1.0, out)


def some_rows(rng: random.Random, reach: Reach) -> list[SequenceRows]:
    """Returns rows of some sequences: trees, prompts, or committed tokens for a draft."""
    most_sequences = rng.choice((1, 1, 1, 2, 5, reach.num_sequences))
    most_rows = rng.choice((1, 2, 4, 20, 70, 300, reach.num_rows))
    longest = math.exp(rng.uniform(0, math.log(reach.num_keys)))
    has_trees = reach.num_tree_rows > 2 and rng.random() < 0.5
    left = reach.num_rows
    found = []
    for _ in range(rng.randint(1, most_sequences)):
        count = rng.randint(1, min(most_rows, left, reach.num_keys))
        is_tree = has_trees and count > 2 and rng.random() < 0.8
        if is_tree:
            count = rng.randint(3, min(count, reach.num_tree_rows))
        start = rng.randint(0, min(int(longest), reach.num_keys - count))
        pages = [0] * -(-(start + count) // PAGE)
        if is_tree:
            tree = DraftTree((0,) * (count - 1), (-1,) * (count - 1))
            found.append(SequenceRows.tree(pages, start, 0, tree))
        else:
            found.append(SequenceRows.chunk(pages, start, [0] * count))
        left -= count
        if not left:
            break
    return found


@pytest.mark.parametrize("kind", list(BACKENDS))
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("reach", REACHES.values(), ids=list(REACHES))
def test_every_variant_of_attention_is_met(
    reach: Reach, name: str, kind: type[AttentionBackend]
) -> None:
    attention = kind()
    num_heads, num_kv_heads, head_dim = SHAPES[name]
    dtype = torch.float8_e4m3fn if "8 bits" in name else torch.bfloat16
    kv = PagedKV(1, 4, PAGE, num_kv_heads, head_dim, dtype, META)
    rng = random.Random(name)
    with recorded_launches() as met:
        forwards = forwards_to_run(reach, kv, num_heads // num_kv_heads, attention)
        for rows in forwards:
            attend(attention, rows, kv, num_heads, reach.cut_keys)
        warmed: set[Hashable] = set(met)
        for _ in range(250):
            rows = some_rows(rng, reach)
            attend(attention, rows, kv, num_heads, reach.cut_keys)
            assert met <= warmed, rows
    # Each takes most of a second to compile.
    assert len(forwards) <= 9
    assert 1 <= len(warmed) <= BACKENDS[kind]


@pytest.mark.parametrize(
    ("num_keys", "lengths"), [(8192, [7700]), (4096, [3850, 3850]), (3000, [2567, 2567, 2567])]
)
def test_halves_are_run_where_a_step_is_large_enough(num_keys: int, lengths: list[int]) -> None:
    """Also where no sequence is as long as a step."""
    kv = PagedKV(1, 4, PAGE, 8, 128, torch.bfloat16, META)
    for num_rows, added in ((7699, []), (9000, [lengths])):
        before, after = (
            forwards_to_run(
                Reach(num_rows, 16, num_keys, halved_rows=halved), kv, 4, ExactAttention()
            )
            for halved in (None, 7700)
        )
        assert [[len(one.tokens) for one in rows] for rows in after[len(before) :]] == added
