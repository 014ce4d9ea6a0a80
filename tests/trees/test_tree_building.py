"""Beam drafting: EAGLE-2's worked example, a brute-force search, and a draft that equals the
target.
"""

import hashlib
import itertools
import math

import pytest
import torch

from foredraft.sampling import sampling
from foredraft.sampling.rows import SamplingRows
from foredraft.trees.draft_tree import EMPTY, DraftTree, depths, paths
from foredraft.trees.tree_building import BeamTree, Ordering
from foredraft.types import SamplingParams
from verify_service.executor.choice.verification import walk

NAMES = "ABCDEFGHKL"
A, B, C, D, E, F, G, H, K, L = range(10)


def log_row(**probs: float) -> torch.Tensor:
    """Logits with these probabilities; the other tokens share what is left."""
    left = max(1e-9, 1 - sum(probs.values())) / (10 - len(probs))
    return torch.tensor([math.log(probs.get(name, left)) for name in NAMES])


def test_worked_example() -> None:
    beams = BeamTree(1, num_steps=3, topk=2, num_draft_tokens=6)
    tokens, parents = beams.expand(log_row(A=0.6, B=0.3)[None, None])
    assert (tokens.tolist(), parents.tolist()) == ([[A, B]], [[0, 0]])
    assert beams.ancestor_rows().int().tolist() == [[[1, 0], [0, 1]]]
    tokens, parents = beams.expand(
        torch.stack([log_row(C=0.5, D=0.35), log_row(E=0.9, F=0.05)])[None]
    )
    assert (tokens.tolist(), parents.tolist()) == ([[C, E]], [[0, 1]])
    assert beams.ancestor_rows().int().tolist() == [[[1, 0, 1, 0], [0, 1, 0, 1]]]
    beams.expand(torch.stack([log_row(G=0.8, H=0.1), log_row(K=0.5, L=0.3)])[None])
    assert beams.finish() == [DraftTree((A, B, C, E, G), (-1, -1, 0, 1, 2))]
    assert beams.finish([3]) == [DraftTree((A, B, C), (-1, -1, 0))]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chain_has_one_token_a_level_and_ends_at_each_limit(temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in (4, 5)]
    rows = SamplingRows.from_params(params, [9, 9])
    beams = BeamTree(2, num_steps=3, topk=1, num_draft_tokens=3, ordering="coupled", rows=rows)
    token_map = torch.arange(10) * 3
    expected: list[list[int]] = [[], []]
    for level in range(3):
        logits = torch.randn(2, 1, 10, generator=torch.Generator().manual_seed(level))
        places = [9 + level] * 2
        whole = torch.full((2, 30), -math.inf)
        whole[:, ::3] = logits[:, 0]
        chosen = sampling.choose(whole, SamplingRows.from_params(params, places)).tolist()
        tokens, parents = beams.expand(logits, token_map)
        assert tokens.tolist() == [[chosen[0]], [chosen[1]]]
        assert parents.tolist() == [[0], [0]]
        assert beams.ancestor_rows().tolist() == [[[True] * (level + 1)]] * 2
        for row, token in zip(expected, chosen, strict=True):
            row.append(token)
    first, second = expected
    assert beams.finish() == [DraftTree(tuple(row[:2]), (-1, 0)) for row in expected]
    assert beams.finish([1, 7]) == [
        DraftTree((first[0],), (-1,)),
        DraftTree((second[0], second[1]), (-1, 0)),
    ]


def test_beams_may_cross() -> None:
    beams = BeamTree(1, num_steps=2, topk=2, num_draft_tokens=8)
    beams.expand(log_row(A=0.5, B=0.45)[None, None])
    tokens, parents = beams.expand(
        torch.stack([log_row(C=0.3, D=0.3), log_row(E=0.6, F=0.4)])[None]
    )
    assert (tokens.tolist(), parents.tolist()) == ([[E, F]], [[1, 1]])
    assert beams.ancestor_rows().int().tolist() == [[[0, 1, 1, 0], [0, 1, 0, 1]]]


def model(history: tuple[int, ...], vocab: int, salt: int = 0) -> torch.Tensor:
    digest = hashlib.blake2b(repr((history, salt)).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest) >> 2
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draft(
    histories: list[tuple[int, ...]],
    vocab: int,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    ordering: Ordering,
    rows: SamplingRows | None,
) -> list[DraftTree]:
    beams = BeamTree(len(histories), num_steps, topk, num_draft_tokens, ordering, rows)
    current = [[history] for history in histories]
    for level in range(num_steps):
        logits = torch.stack([torch.stack([model(h, vocab) for h in row]) for row in current])
        tokens, parents = beams.expand(logits)
        assert beams.ancestor_rows().sum(-1).eq(level + 1).all()
        current = [
            [(*row[p], t) for t, p in zip(row_tokens, row_parents, strict=True)]
            for row, row_tokens, row_parents in zip(
                current, tokens.tolist(), parents.tolist(), strict=True
            )
        ]
    return beams.finish()


@pytest.mark.parametrize(
    ("num_steps", "topk", "num_draft_tokens"), [(3, 2, 6), (4, 3, 12), (2, 4, 30)]
)
def test_topk_tree_matches_a_plain_search(num_steps: int, topk: int, num_draft_tokens: int) -> None:
    vocab, histories = 9, [(1,), (2, 3)]
    trees = draft(histories, vocab, num_steps, topk, num_draft_tokens, "topk", None)
    for history, tree in zip(histories, trees, strict=True):
        everything: list[tuple[float, tuple[int, ...]]] = []
        level = [(0.0, ())]
        for _ in range(num_steps):
            found = []
            for score, path in level:
                log_probs = model((*history, *path), vocab).log_softmax(-1)
                best = sorted(range(vocab), key=lambda v: -log_probs[v])[:topk]
                found += [(score + float(log_probs[v]), (*path, v)) for v in best]
            everything += found
            level = sorted(found, reverse=True)[:topk]
        want = sorted(everything, reverse=True)[: num_draft_tokens - 1]
        assert set(map(tuple, paths(tree)[1:])) == {path for _, path in want}


def test_a_chain_is_the_greedy_continuation() -> None:
    (tree,) = draft([(5,)], 11, 4, 1, 5, "topk", None)
    history: tuple[int, ...] = (5,)
    for token in tree.tokens:
        assert token == int(model(history, 11).argmax())
        history = (*history, token)
    assert tree.parents == (-1, 0, 1, 2)


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t, (k, p, m) in itertools.product(
            (0.0, 0.5, 1.0, 3.0), ((-1, 1.0, 0.0), (4, 0.8, 0.0), (1, 1.0, 0.0), (-1, 1.0, 0.2))
        )
    ],
    ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_a_draft_with_the_targets_weights_is_accepted_completely(
    params: SamplingParams, topk: int
) -> None:
    vocab, num_steps = 30, 4
    histories = [(seed, 7) for seed in range(6)]
    rows = SamplingRows.from_params([params] * 6, [2] * 6)
    rows.seed = torch.arange(6) * 977
    trees = draft(histories, vocab, num_steps, topk, num_steps + 1 + topk, "coupled", rows)
    for index, (history, tree) in enumerate(zip(histories, trees, strict=True)):
        row_paths = paths(tree)
        logits = torch.stack([model((*history, *path), vocab) for path in row_paths])
        target = SamplingRows.from_params(
            [params] * len(row_paths), [2 + len(path) for path in row_paths]
        )
        target.seed = torch.full((len(row_paths),), index * 977)
        verified = walk(tree, sampling.choose(logits, target).tolist())
        assert len(verified.path) == num_steps + 1
        assert all(math.isfinite(token) and 0 <= token < vocab for token in tree.tokens)


def test_filtered_out_tokens_are_not_drafted() -> None:
    rows = SamplingRows.from_params([SamplingParams(top_k=2)], [1])
    (tree,) = draft([(3,)], 20, 2, 4, 30, "coupled", rows)
    assert len(tree) == 2 + 4
    assert depths(tree.parents).count(1) == 2


def test_mixed_batches_draft_every_row_as_alone() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=4),
        SamplingParams(temperature=2.0, seed=5),
    ]
    histories = [(1,), (2,), (3,)]
    together = draft(histories, 25, 3, 3, 9, "coupled", SamplingRows.from_params(params, [1, 1, 1]))
    for index, history in enumerate(histories):
        rows = SamplingRows.from_params([params[index]], [1])
        assert draft([history], 25, 3, 3, 9, "coupled", rows) == [together[index]]


def test_a_reduced_vocabulary_is_keyed_by_target_ids() -> None:
    token_map = torch.tensor([40, 3, 17, 29, 8])
    rows = SamplingRows.from_params([SamplingParams(temperature=1.0, seed=11)], [6])
    reduced = torch.tensor([[[0.3, 0.1, 0.5, -0.2, 0.4]]])
    beams = BeamTree(1, 1, 3, 4, "coupled", rows)
    tokens, _ = beams.expand(reduced, token_map)
    full = torch.full((1, 50), -math.inf)
    full[0, token_map] = reduced[0, 0]
    assert int(tokens[0, 0]) == int(sampling.choose(full, rows)[0])
    assert tokens[0].tolist() == sampling.perturbed_top(full, rows, 3)[0][0].tolist()


def test_nothing_expanded_gives_no_draft() -> None:
    assert BeamTree(2, 3, 2, 6).finish() == [EMPTY, EMPTY]


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BeamTree(1, 0, 1, 1)
    with pytest.raises(ValueError, match="sampling rows"):
        BeamTree(1, 1, 1, 2, "coupled")
    with pytest.raises(ValueError, match="vocabulary"):
        BeamTree(1, 1, 4, 5).expand(torch.zeros(1, 1, 3))
    beams = BeamTree(1, 1, 1, 2)
    beams.expand(torch.zeros(1, 1, 3))
    with pytest.raises(ValueError, match="expanded already"):
        beams.expand(torch.zeros(1, 1, 3))
