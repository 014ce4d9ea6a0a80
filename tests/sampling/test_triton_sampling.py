"""The rule, the check, the walk and the move of KV in Triton, against the Python versions; on a GPU
or interpreted.
"""

import itertools
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foredraft.kvcache.paged_kv import PagedKV
from foredraft.sampling import filters as filters_module
from foredraft.sampling import noise, sampling
from foredraft.sampling.rows import SamplingRows
from foredraft.sampling.triton_sampling import choose_tokens, gumbel
from foredraft.trees import draft_tree
from foredraft.trees.draft_tree import DraftTree
from foredraft.types import NO_TOKEN, SamplingParams
from testing.static_trees import ancestors
from testing.triton_device import DEVICE, INTERPRETED, needs_triton
from verify_service.executor.choice import verification
from verify_service.executor.kernels.trees import commit_paths, prepare_trees, walk_trees

pytestmark = [needs_triton, pytest.mark.gpu]

EXAMPLES = 10 if INTERPRETED else 100


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_noise_is_that_of_the_recipe():
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator)
    positions = torch.tensor([0, 1, 7, 131071, 2**31])
    tokens = torch.arange(0, 300_000, 37 if INTERPRETED else 1)
    want = noise.gumbel(seeds, positions, tokens).double()
    got = gumbel(seeds.to(DEVICE), positions.to(DEVICE), tokens.to(DEVICE)).cpu().double()
    error = ((got - want).abs() / (want.abs().clamp_min(1.0) * 2**-23)).max()
    assert error <= 2.0


def test_noise_at_both_ends_of_the_hash():
    """The seeds are found by search: what matters is that the extremes of w are exact enough
    too.
    """
    k0, k1 = noise.row_keys(torch.tensor([3]), torch.tensor([5]))
    tokens = torch.arange(2_000_000)
    h32 = noise.hash_tokens(k0, k1, tokens.to(torch.int32)).to(torch.int64) & 0xFFFFFFFF
    order = h32.argsort()
    tokens = torch.cat((tokens[order[:500]], tokens[order[-500:]]))
    want = noise.gumbel(torch.tensor([3]), torch.tensor([5]), tokens).double()
    assert want.max() > 12
    assert want.min() < -2.5
    got = gumbel(ints([3], torch.int64), ints([5], torch.int64), tokens.to(DEVICE)).cpu().double()
    assert ((got - want).abs() / (want.abs().clamp_min(1.0) * 2**-23)).max() <= 2.0


def rows_of(temperatures, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = len(temperatures)
    asked = [SamplingParams(temperature=each, top_k=-1) for each in temperatures]
    return replace(
        SamplingRows.from_params(asked, [0] * count),
        top_k=torch.zeros(count, dtype=torch.int64),
        seed=torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
        position=torch.randint(0, 10_000, (count,), generator=generator),
        any_filtered=False,
    )


def moved(rows):
    values = ((each.name, getattr(rows, each.name)) for each in fields(rows))
    tensors = {name: v.to(DEVICE) for name, v in values if isinstance(v, torch.Tensor)}
    return replace(rows, **tensors)


def chosen_by_kernel(logits, rows):
    return choose_tokens(logits.to(DEVICE), moved(rows)).cpu()


@pytest.mark.parametrize("vocab", [5, 1000, 4099, 32_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chooses_as_the_rule(vocab, dtype):
    rows = rows_of([0.0, 0.3, 1.0, 2.0, 0.0, 0.7, 1.3], vocab)
    logits = (torch.randn(7, vocab, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    got = chosen_by_kernel(logits, rows)
    want = sampling.choose(logits.float(), rows)
    if not torch.equal(got, want):  # only where rounding decides
        scores = (logits.double() - logits.double().amax(-1, keepdim=True)) / rows.temperature[
            :, None
        ].double().clamp_min(1e-9)
        scores += noise.gumbel(rows.seed, rows.position, torch.arange(vocab)).double()
        for row in (got != want).nonzero()[:, 0].tolist():
            assert rows.temperature[row] > 0
            assert abs(scores[row, got[row]] - scores[row, want[row]]) < 1e-5


def test_rows_in_parts_with_any_filters():
    """Steps that are not captured as a whole choose in this way on a GPU."""
    count = sampling._KERNEL_ROWS + 3
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.3)[i % 3],
            top_p=(1.0, 0.8)[i % 2],
            top_k=(0, 5, 40)[i // 2 % 3],
            min_p=(0.0, 0.1)[i // 3 % 2],
            seed=i,
        )
        for i in range(count)
    ]
    logits = 3 * torch.randn(count, 300, generator=torch.Generator().manual_seed(5))
    want = sampling.choose(logits.clone(), SamplingRows.from_params(params, range(count)))
    rows = SamplingRows.from_params(params, range(count), DEVICE)
    got = sampling._choose_by_kernels(logits.to(DEVICE), rows)
    assert got.tolist() == want.tolist()


def test_ties_go_to_the_lowest_id_and_broken_rows_choose_nothing():
    logits = torch.zeros(10, 5000)
    logits[1, [4000, 17, 3000]] = 1.0
    logits[2, 3] = math.nan
    logits[6, 4999] = math.inf
    logits[7, 2500] = math.nan
    logits[8, 0] = math.inf
    logits[9] = math.nan
    logits[3] = -math.inf
    logits[4] = -math.inf
    logits[5] = -math.inf
    logits[5, 4321] = -50.0
    rows = rows_of([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    want = [0, 17, NO_TOKEN, 0, 0, 4321, *[NO_TOKEN] * 4]
    assert chosen_by_kernel(logits, rows).tolist() == want
    assert sampling.choose(logits, rows).tolist() == want
    filters = [(0, 1.0, 0.0), (9, 0.5, 0.1)] * 5
    filtered = filtered_by_kernel(logits, filtered_rows(rows.temperature.tolist(), filters))
    assert ((filtered == NO_TOKEN) == (torch.tensor(want) == NO_TOKEN)).all()


FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (40, 0.9, 0.0),
    (0, 0.5, 0.0),
    (0, 0.95, 0.0),
    (0, 0.999, 0.05),
    (0, 1.0, 0.2),
    (700, 0.8, 0.01),
    (10**6, 0.3, 0.0),
    (3, 0.01, 1.0),
]


def filtered_rows(temperatures, filters, seed=0):
    rows = rows_of(temperatures, seed)
    rows.top_k = torch.tensor([f[0] for f in filters])
    rows.top_p = torch.tensor([f[1] for f in filters], dtype=torch.float32)
    rows.min_p = torch.tensor([f[2] for f in filters], dtype=torch.float32)
    return replace(rows, any_ranked=True, any_filtered=True)


def filtered_by_kernel(logits, rows):
    return choose_tokens(logits.to(DEVICE), moved(rows)).cpu()


def chooses_as_filtered(logits, rows):
    """Whether each row's choice is one that the rule allows, by sorting in float64; else what is
    known of it, for a look.

    Rounding may decide between two noisy scores, and at the end of what top-p and min-p keep.
    """
    chosen = filtered_by_kernel(logits, rows)
    logits = sampling.scrub(logits.float())
    scores = filters_module.tempered(logits, rows)
    noisy = (
        scores + noise.gumbel(rows.seed, rows.position, torch.arange(logits.shape[1]))
    ).double()
    wrong = []
    for row, (token, k) in enumerate(zip(chosen.tolist(), rows.top_k.tolist(), strict=True)):
        if rows.temperature[row] == 0 or scores[row].max() == -math.inf:
            if token != logits[row].argmax():
                wrong.append((row, token))
            continue
        order = np.lexsort((np.arange(len(scores[row])), -scores[row].double().numpy()))
        order = torch.from_numpy(order.copy())[: k if k > 0 else None]
        mass = scores[row, order].double().exp()
        before, p, least = mass.cumsum(0) - mass, rows.top_p[row].double(), rows.min_p[row].double()
        wanted = p * mass.sum() if p < 1 else torch.tensor(math.inf)
        near = 2e-6 * mass.sum()
        may_be = order[(before < wanted + near) & (mass >= least * (1 - 1e-6)) & (mass > 0)]
        surely = order[(before < wanted - near) & (mass >= least * (1 + 1e-6)) | (before == 0)]
        if token not in may_be or noisy[row, token] < noisy[row, surely].max() - 1e-5:
            place = (order == token).nonzero().flatten().tolist()
            wrong.append(
                f"row {row}: T={rows.temperature[row]} k={k} p={p} min-p={least}: chose {token} of"
                f" score {scores[row, token]} + noise = {noisy[row, token]}, placed {place} of"
                f" {len(order)}, mass before it {before[place].tolist()}, wanted {wanted}; best"
                f" surely kept {surely[noisy[row, surely].argmax()]}, {len(surely)} to"
                f" {len(may_be)} kept"
            )
    assert not wrong, "\n".join(map(str, wrong[:5]))
    return chosen


def test_a_top_p_that_float32_rounds_to_zero_keeps_the_best_token():
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    rows = filtered_rows([1.0] * 3, [(0, 1e-46, 0.0), (5, 1e-46, 0.0), (0, 1e-46, 0.1)])
    assert torch.equal(filtered_by_kernel(logits, rows), logits.argmax(-1))


@pytest.mark.parametrize("vocab", [5, 4099] if INTERPRETED else [5, 1000, 4099, 32_000, 128_256])
@pytest.mark.parametrize("spread", [0.05, 4.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chooses_as_the_filtered_rule(vocab, spread, dtype):
    temperatures = [0.0, *[0.7, 1.0, 1.5] * 4][: len(FILTERS) + 1]
    filters = [(3, 0.5, 0.1), *FILTERS]
    logits = torch.randn(len(filters), vocab, generator=torch.Generator().manual_seed(vocab))
    logits = (logits * spread).to(dtype)  # bfloat16 has many ties
    for seed in range(1 if INTERPRETED else 4):
        chooses_as_filtered(logits, filtered_rows(temperatures, filters, seed))


def dominated(x):
    x[:, 77] = 40.0
    return x


def masked(x):
    """Masks like a grammar: leaves one token in twenty, in the last rows fewer, in the very
    last one.
    """
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) > 0.05] = -math.inf
    x[-3:, 3:] = -math.inf
    x[-1] = -math.inf
    x[-1, -1] = -9.0
    return x


SHAPES = {
    "level": torch.zeros_like,
    "three values": lambda x: x.clamp(-0.5, 0.5).round(),
    "flat": lambda x: x * 0.01,
    "wide": lambda x: x * 8,
    "in bfloat16": lambda x: (x * 3).bfloat16(),
    "dominated": dominated,
    "masked": masked,
}


@pytest.mark.parametrize("vocab", [1031] if INTERPRETED else [1031, 4099, 151_936, 262_144])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_filters_together(vocab, shape):
    every = itertools.product((0, 1, 3, 50, 900), (1.0, 1 - 1e-7, 0.95, 0.5, 1e-6), (0.0, 0.3))
    filters = list(every)[:: 7 if INTERPRETED else 1 if vocab < 10_000 else 3]
    generator = torch.Generator().manual_seed(5)
    logits = SHAPES[shape](torch.randn(len(filters), vocab, generator=generator))
    rows = filtered_rows(([1.0, 0.6, 1.7] * 17)[: len(filters)], filters, vocab)
    together = chooses_as_filtered(logits, rows)
    if shape in ("level", "dominated"):  # nothing for rounding to decide
        assert torch.equal(together, sampling.choose(logits, rows))
    # Whatever else is in the batch.
    for row in range(0, len(filters), 11):
        one = torch.tensor([row])
        assert filtered_by_kernel(logits[one], rows.take(one)) == together[row]


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.lists(st.sampled_from([-math.inf, -7.0, -3.0, -0.5, 0.0, 0.25]), min_size=1, max_size=9),
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.sampled_from([1.0, 0.9, 0.37, 1e-6]),
            st.sampled_from([0.0, 0.4, 1.0]),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 1000),
)
def test_filters_among_few_tokens(values, filters, seed):
    logits = torch.tensor([values] * len(filters))
    chooses_as_filtered(logits, filtered_rows([1.0] * len(filters), filters, seed))


def test_filters_break_ties_by_id():
    logits = torch.zeros(8, 3000)
    logits[:, [7, 2000]] = 1.0
    filters = [(1, 1.0, 0.0), (2, 1.0, 0.0), (3, 1.0, 0.0), (0, 1e-6, 0.0), (0, 1.0, 1.0)]
    filters += [(300, 1.0, 0.0), (0, 0.5, 0.0), (2000, 0.5, 0.0)]
    allowed = [{7}, {7, 2000}, {0, 7, 2000}, {7}, {7, 2000}]
    allowed += [{*range(299), 2000}]
    for seed in range(1 if INTERPRETED else 6):
        rows = filtered_rows([1.0] * 8, filters, seed)
        got = filtered_by_kernel(logits, rows)
        assert torch.equal(got, sampling.choose(logits, rows))
        for token, tokens in zip(got.tolist(), allowed, strict=False):
            assert token in tokens


def test_filters_of_rows_without_numbers():
    logits = torch.full((3, 3000), -math.inf)
    logits[1, 5] = math.nan
    logits[1, 9] = -3.0
    logits[2, 11] = math.inf
    rows = filtered_rows([1.0] * 3, [(2, 0.5, 0.1)] * 3)
    assert filtered_by_kernel(logits, rows).tolist() == [0, NO_TOKEN, NO_TOKEN]


def test_rows_may_lie_apart():
    wide = torch.randn(3, 3000, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    rows = moved(rows_of([0.0, 1.0, 0.0]))
    assert torch.equal(
        choose_tokens(wide[:, :2000], rows), choose_tokens(wide[:, :2000].contiguous(), rows)
    )


@st.composite
def tree(draw, max_nodes=12, vocab=4):
    count = draw(st.integers(0, max_nodes))
    tokens = tuple(draw(st.integers(0, vocab - 1)) for _ in range(count))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(count))
    return DraftTree(tokens, parents)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(tree(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_walks_as_verification_does(trees, random):
    num_rows = 13
    chosen = [[random.randrange(4) for _ in range(num_rows)] for _ in trees]
    tokens = [[0, *t.tokens] + [0] * (num_rows - 1 - len(t)) for t in trees]
    parents = [[-1, *(p + 1 for p in t.parents)] + [-2] * (num_rows - 1 - len(t)) for t in trees]
    wide = torch.cat((ints(tokens), ints(parents)), 1)  # views of one record, as a step has them
    path, length, emitted = walk_trees(
        ints(chosen, torch.int64), wide[:, :num_rows], wide[:, num_rows:]
    )
    for i, (one, row_chosen) in enumerate(zip(trees, chosen, strict=True)):
        want = verification.walk(one, row_chosen)
        padding = [-1] * (num_rows - len(want.path))
        assert path[i].tolist() == want.path + padding
        assert emitted[i].tolist() == want.tokens + padding
        assert length[i] == len(want.path)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(-3, 9), st.integers(-4, 9)), min_size=7, max_size=7),
        min_size=1,
        max_size=3,
    )
)
@example([[(0, 0), (0, 0), (0, 0), (0, -1), (0, -1), (0, 0), (0, 4)]])
def test_what_a_draft_sent_is_checked_as_sanitize_does(proposals):
    vocab, size = 6, len(proposals)
    tokens = [[2, *(token for token, _ in nodes)] for nodes in proposals]
    parents = [[-1, *(parent + 1 for _, parent in nodes)] for nodes in proposals]
    committed = [5 + i for i in range(size)]
    num_rows = [8 - i for i in range(size)]
    tables = [[3 * i, 3 * i + 1, 3 * i + 2, 3 * i + 3] for i in range(size)]
    rows = prepare_trees(
        ints(tokens), ints(parents), ints(committed), ints(num_rows), ints(tables), 4, vocab, 999
    )
    seen, depth = ancestors(ints(parents))
    assert torch.equal(rows.mask.view(seen.shape).bool(), seen)
    positions = depth + ints(committed, torch.int64)[:, None]
    assert torch.equal(rows.positions.view(size, 8), positions)
    assert rows.tokens.tolist() == [min(max(t, 0), vocab - 1) for row in tokens for t in row]
    for i in range(size):
        keys = range(committed[i], committed[i] + 8)
        slots = [tables[i][key // 4] * 4 + key % 4 for key in keys]
        padding = [999] * (8 - num_rows[i])
        assert rows.slots.view(size, 8)[i].tolist() == slots[: num_rows[i]] + padding
        # What the walk can reach is what sanitize keeps.
        nodes = [[token for token, _ in proposals[i]], [parent for _, parent in proposals[i]]]
        want, _ = draft_tree.sanitize(*nodes, vocab, 7)
        for path in draft_tree.paths(want):
            chosen = torch.full((1, 8), -5, dtype=torch.int64)
            row = followed = 0
            for token in path:
                chosen[0, row] = token
                children = (
                    r for r in range(row + 1, 8) if parents[i][r] == row and tokens[i][r] == token
                )
                child = next(children, None)
                if child is None:
                    # It is the child of the later of two equal siblings, which sanitize makes one;
                    # the walk takes the first.
                    assert len(set(proposals[i])) < len(proposals[i])
                    break
                row, followed = child, followed + 1
            _, length, emitted = walk_trees(
                chosen.to(DEVICE), ints(tokens[i : i + 1]), ints(parents[i : i + 1])
            )
            assert emitted[0, :followed].tolist() == path[:followed]
            assert int(length[0]) == followed + 1


@pytest.mark.parametrize("head_dim", [8, 80])
def test_moves_the_kv_of_accepted_rows(head_dim):
    rng = np.random.default_rng(0)
    kv = PagedKV(3, 12, 4, 2, head_dim, torch.float32, DEVICE)
    kv.data.copy_(torch.from_numpy(rng.normal(size=tuple(kv.data.shape))))
    before = kv.data.clone()
    tables = rng.permutation(12).reshape(3, 4)
    committed = [5, 2, 9]
    paths = [[0, 1, 3, 4, 6], [0], [0, 2, 3]]
    padded = [path + [-1] * (7 - len(path)) for path in paths]
    commit_paths(kv, ints(tables.tolist()), ints(committed), ints(padded), ints([5, 1, 3]))
    want = before.clone()
    for table, start, path in zip(tables, committed, paths, strict=True):
        for index, row in enumerate(path):
            slots = [table[k // 4] * 4 + k % 4 for k in (start + row, start + index)]
            want[:, :, slots[1]] = before[:, :, slots[0]]
    assert torch.equal(kv.data, want)
