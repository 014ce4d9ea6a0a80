"""Walking a tree: against brute force, without loss for any draft, and with the promised loss where
asked for.
"""

import hashlib

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from foredraft.sampling import noise, sampling
from foredraft.sampling.rows import SamplingRows
from foredraft.trees.draft_tree import EMPTY, DraftTree, paths, sanitize
from foredraft.types import NO_TOKEN, SamplingParams
from verify_service.executor.choice.penalties import PenaltyState, needed
from verify_service.executor.choice.verification import Verified, walk, walk_batch, walk_lossy

VOCAB = 6


def trees(max_nodes: int = 12) -> st.SearchStrategy[DraftTree]:
    nodes = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(0, 50)), max_size=max_nodes)
    return nodes.map(
        lambda raw: sanitize(
            [t for t, _ in raw], [p % (i + 1) - 1 for i, (_, p) in enumerate(raw)], VOCAB, max_nodes
        )[0]
    )


def target_logits(history: list[int]) -> torch.Tensor:
    """A simulated target: any function of the history will do."""
    digest = hashlib.blake2b(bytes(token % 251 for token in history), digest_size=8).digest()
    return (
        torch.randn(VOCAB, generator=torch.Generator().manual_seed(int.from_bytes(digest) >> 2))
        * 1.5
    )


@given(trees(), st.lists(st.integers(0, VOCAB - 1), min_size=13, max_size=13))
def test_walk_follows_the_longest_path_that_the_rule_gives(
    tree: DraftTree, chosen: list[int]
) -> None:
    got = walk(tree, chosen)
    # By brute force: rows whose every ancestor chose the next token on the way.
    rows = {(): 0}
    reached = [0]
    for row, path in enumerate(paths(tree)):
        rows.setdefault(tuple(path), row)
    for path, row in rows.items():
        steps = [rows[path[:i]] for i in range(len(path))]
        if row and all(chosen[steps[i]] == path[i] for i in range(len(path))):
            reached.append(row)
    longest = max(reached, key=lambda row: len(paths(tree)[row]))
    assert got.path[0] == 0
    assert got.path[-1] == longest
    assert got.tokens == [chosen[row] for row in got.path]
    assert got.tokens[:-1] == paths(tree)[longest]


@given(
    st.lists(
        st.tuples(trees(), st.lists(st.integers(0, VOCAB - 1), min_size=13, max_size=13)),
        max_size=4,
    )
)
def test_walking_a_batch_asks_only_for_rows_on_the_paths(
    batch: list[tuple[DraftTree, list[int]]],
) -> None:
    asked: list[tuple[int, int]] = []

    def choose(pairs: list[tuple[int, int]]) -> list[int]:
        asked.extend(pairs)
        return [batch[sequence][1][row] for sequence, row in pairs]

    got = walk_batch([tree for tree, _ in batch], choose)
    assert got == [walk(tree, chosen) for tree, chosen in batch]
    assert sorted(asked) == [(i, row) for i, result in enumerate(got) for row in result.path]


def generate(
    params: SamplingParams, prompt: list[int], num_tokens: int, proposals: list[DraftTree]
) -> tuple[list[int], int]:
    """Decodes with the target above, a proposal per step (then none), and says how many drafted
    tokens were accepted.
    """
    output: list[int] = []
    penalties = PenaltyState(params, prompt, VOCAB) if needed(params) else None
    num_accepted = step = 0
    while len(output) < num_tokens:
        tree = proposals[step] if step < len(proposals) else EMPTY
        step += 1
        row_paths = paths(tree)
        history = prompt + output
        logits = torch.stack([target_logits(history + path) for path in row_paths])
        index = [len(output) + len(path) for path in row_paths]
        if penalties:
            penalties.apply_(logits, row_paths, index)
        rows = SamplingRows.from_params([params] * len(row_paths), [len(prompt) + i for i in index])
        verified = walk(tree, sampling.choose(logits, rows).tolist())
        output += verified.tokens
        if penalties:
            penalties.commit(verified.tokens)
        num_accepted += len(verified.tokens) - 1
    return output[:num_tokens], num_accepted


@settings(max_examples=60)
@given(
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
        top_k=st.sampled_from([-1, 3]),
        top_p=st.sampled_from([1.0, 0.9]),
        min_p=st.sampled_from([0.0, 0.1]),
        repetition_penalty=st.sampled_from([1.0, 1.2]),
        frequency_penalty=st.sampled_from([0.0, 0.4]),
        seed=st.integers(0, 2**64 - 1),
    ),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    proposals=st.lists(trees(), max_size=10),
)
def test_any_draft_leaves_the_text_as_it_is(
    params: SamplingParams, prompt: list[int], proposals: list[DraftTree]
) -> None:
    assert generate(params, prompt, 12, proposals)[0] == generate(params, prompt, 12, [])[0]


def test_drafts_are_accepted_in_that_test() -> None:
    full = DraftTree(
        tuple(range(VOCAB)) * (VOCAB + 1),
        (-1,) * VOCAB + tuple(parent for parent in range(VOCAB) for _ in range(VOCAB)),
    )
    text, num_accepted = generate(SamplingParams(seed=3), [1], 30, [full] * 30)
    assert num_accepted == 20  # two of every three tokens
    assert text == generate(SamplingParams(seed=3), [1], 30, [])[0]


LOGITS = torch.tensor([1.0, 0.0, -1.0, 0.5, -0.5, -2.0])
PROBS = LOGITS.double().softmax(-1).numpy()


def lossy_tokens(
    tree: DraftTree, single: float, acc: float, n: int = 8000
) -> tuple[np.ndarray, np.ndarray]:
    """First tokens of n seeds, and whether each was a child."""
    rows = SamplingRows.from_params([SamplingParams()] * n, [5] * n)
    rows.seed = torch.arange(n)
    chosen = sampling.choose(LOGITS.expand(n, -1), rows).tolist()
    coins = noise.coins(rows.seed, rows.position).tolist()
    probs = [PROBS[token] for token in tree.tokens]
    width = len(tree) + 1
    results = [
        walk_lossy(tree, [token] * width, probs, [coin] * width, single, acc)
        for token, coin in zip(chosen, coins, strict=True)
    ]
    return np.array([r.tokens[0] for r in results]), np.array([len(r.path) > 1 for r in results])


TWO_CHILDREN = DraftTree((2, 1), (-1, -1))


def test_thresholds_at_one_change_nothing() -> None:
    tokens, _ = lossy_tokens(TWO_CHILDREN, 1.0, 1.0)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert stats.chisquare(counts, len(tokens) * PROBS).pvalue > 1e-4


def test_single_threshold_accepts_the_first_child_that_passes() -> None:
    tokens, accepted = lossy_tokens(TWO_CHILDREN, float(PROBS[1]) - 1e-6, 1.0)
    assert accepted.all()
    assert set(tokens) == {1, 2}
    assert stats.binomtest(int((tokens == 2).sum()), len(tokens), PROBS[2]).pvalue > 1e-4
    tokens, accepted = lossy_tokens(TWO_CHILDREN, float(PROBS[1]) + 1e-6, 1.0)
    assert stats.binomtest(int(accepted.sum()), len(tokens), PROBS[1] + PROBS[2]).pvalue > 1e-4


def test_acc_threshold_gives_the_promised_acceptance() -> None:
    mass = PROBS[1] + PROBS[2]
    for acc in (0.9, 0.5, float(mass) / 2):
        tokens, accepted = lossy_tokens(TWO_CHILDREN, 1.0, acc)
        want = min(1.0, mass / acc)
        if want == 1:
            assert accepted.all()
        else:
            assert stats.binomtest(int(accepted.sum()), len(tokens), want).pvalue > 1e-4
        # The child with the most mass takes all that is added.
        assert stats.binomtest(int((tokens == 2).sum()), len(tokens), PROBS[2]).pvalue > 1e-4


def test_greedy_requests_are_never_lossy() -> None:
    rows = SamplingRows.from_params([SamplingParams(temperature=0.0)], [0])
    probs = sampling.probabilities(LOGITS[None], rows)[0]
    verified = walk_lossy(TWO_CHILDREN, [0, 0, 0], [probs[2], probs[1]], [0.0] * 3, 0.01, 0.01)
    assert verified.tokens == [0]


def test_no_second_chance_where_there_is_no_token_to_choose() -> None:
    tree = DraftTree((3,), (-1,))
    walked = walk_lossy(tree, [NO_TOKEN, 4], [1.0], [0.0, 0.0], 0.5, 0.5)
    assert walked == Verified([0], [NO_TOKEN])
