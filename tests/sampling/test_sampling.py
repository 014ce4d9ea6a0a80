"""The sampling rule: filters against numpy, its distribution, a CPU's code, its independence
of the batch.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from foredraft.cpu import _kernels
from foredraft.sampling import noise, rule_cpu, sampling
from foredraft.sampling.rows import SamplingRows
from foredraft.types import NO_TOKEN, SamplingParams
from testing.speculation_reference import distribution
from testing.triton_device import needs_gpu

GRID = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product(
        (0.4, 1.0, 2.5), (-1, 1, 3, 50), (1.0, 0.8, 0.2), (0.0, 0.1)
    )
]


def rows_for(params: SamplingParams, n: int, position: int = 3) -> SamplingRows:
    rows = SamplingRows.from_params([params] * n, [position] * n)
    rows.seed = torch.arange(n)
    return rows


def same(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Equal bit for bit; where the filters left nothing the column means nothing."""
    return bool((a[1] == b[1]).all() and ((a[0] == b[0]) | (a[1] == -math.inf)).all())


@pytest.mark.parametrize("tied", [False, True])
def test_filters_match_numpy(tied: bool) -> None:
    logits = torch.randn(len(GRID), 40, generator=torch.Generator().manual_seed(1)) * 2
    if tied:
        logits = logits.round()
    got = sampling.probabilities(logits, SamplingRows.from_params(GRID, [0] * len(GRID)))
    for row, params in enumerate(GRID):
        want = distribution(logits[row].numpy(), params)
        # Two probabilities that are equal in exact arithmetic may be cut either way by p only where
        # p falls between them.
        assert np.array_equal(got[row].numpy() > 0, want > 0), params
        np.testing.assert_allclose(got[row].numpy(), want, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("top_k", [-1, 4])
def test_top_p_keeps_no_more_where_it_is_reached_exactly(top_k: int, dense: bool) -> None:
    logits = torch.full((1, 4096), -math.inf)
    # With top-k the other four are cut before the mass is counted.
    equal = [5, 40, 700, 4000] if top_k < 0 else [5, 40, 700, 4000, 4001, 4002, 4003, 4004]
    logits[0, equal] = 2.0
    params = SamplingParams(temperature=1.0, top_p=0.5, top_k=top_k)
    rows = SamplingRows.from_params([params], [3])
    columns, scores = sampling.perturbed_top(logits, rows, 5, dense=dense)
    assert sorted(columns[scores > -math.inf].tolist()) == [5, 40]


def test_greedy_takes_the_lowest_of_equals() -> None:
    for vocab in (7, 8192):
        logits = torch.zeros(3, vocab)
        logits[1, 5] = logits[1, 6] = 1.0
        logits[2, -1] = 2.0
        rows = SamplingRows.from_params([SamplingParams(temperature=0)] * 3, [0, 1, 2])
        assert sampling.choose(logits, rows).tolist() == [0, 5, vocab - 1]


def test_rows_that_are_no_numbers_choose_nothing() -> None:
    for vocab in (8, 8192):
        for temperature in (0.0, 1.0):
            rows = SamplingRows.from_params(
                [SamplingParams(temperature=temperature)] * 3, [0, 1, 2]
            )
            logits = torch.full((3, vocab), -math.inf)
            logits[0, 4], logits[0, 2] = 1.0, math.nan
            logits[1, 6] = math.inf
            assert sampling.choose(logits, rows).tolist() == [NO_TOKEN] * 2 + [0]
            finite = torch.full((3, vocab), -math.inf)
            finite[:, 4] = 1.0
            finite[1] = logits[1]
            assert sampling.choose(finite, rows).tolist() == [4, NO_TOKEN, 4]


@pytest.mark.parametrize("params", [p for p in GRID if p.temperature != 0.4], ids=str)
def test_distribution_is_exact(params: SamplingParams) -> None:
    n = 20000
    logits = torch.tensor([1.0, 0.3, -0.5, 2.0, -1.0, 0.3, -3.0, 0.0])
    chosen = sampling.choose(logits.expand(n, -1), rows_for(params, n))
    counts = np.bincount(chosen.numpy(), minlength=8)
    want = distribution(logits.numpy(), params)
    assert (counts[want == 0] == 0).all()
    if (want > 0).sum() > 1:
        assert stats.chisquare(counts[want > 0], n * want[want > 0]).pvalue > 1e-4


def pair_pvalue(first: np.ndarray, second: np.ndarray, probs: np.ndarray) -> float:
    joint = np.bincount(first * len(probs) + second, minlength=len(probs) ** 2)
    return float(stats.chisquare(joint, len(first) * np.outer(probs, probs).ravel()).pvalue)


def test_consecutive_tokens_are_independent_and_a_broken_rule_is_caught() -> None:
    n, params = 20000, SamplingParams(temperature=1.0)
    logits = torch.tensor([0.5, 0.0, -0.5, 1.0])
    probs = distribution(logits.numpy(), params)
    batch = logits.expand(n, -1)
    tokens = [sampling.choose(batch, rows_for(params, n, position)).numpy() for position in (4, 5)]
    assert pair_pvalue(tokens[0], tokens[1], probs) > 1e-4
    # Noise that forgets the position gives the same token twice.
    assert (
        pair_pvalue(tokens[0], sampling.choose(batch, rows_for(params, n, 4)).numpy(), probs) < 1e-9
    )


def test_acceptance_that_reuses_the_noise_is_caught() -> None:
    # A tempting mistake: accept the draft by a coin made of its own noise, else fall back to the
    # rule with that noise.
    n, params, draft = 20000, SamplingParams(temperature=1.0), 1
    logits = torch.tensor([0.5, 0.0, -0.5, 1.0])
    probs = distribution(logits.numpy(), params)
    rows = rows_for(params, n)
    chosen = sampling.choose(logits.expand(n, -1), rows)
    coin = (-noise.gumbel(rows.seed, rows.position, torch.tensor([draft]))[:, 0]).exp().neg().exp()
    broken = torch.where(coin < probs[draft], draft, chosen)
    assert stats.chisquare(np.bincount(chosen, minlength=4), n * probs).pvalue > 1e-4
    assert stats.chisquare(np.bincount(broken, minlength=4), n * probs).pvalue < 1e-9


@settings(max_examples=40)
@given(
    vocab=st.sampled_from([1, 5, 256, 300, 1000, 4096]),
    scale=st.sampled_from([0.0, 0.3, 2.0, 8.0, 40.0]),
    ties=st.booleans(),
    masked=st.booleans(),
    params=st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([1e-4, 0.2, 1.0, 5.0]),
            top_k=st.sampled_from([-1, 1, 2, 20, 5000]),
            top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-4]),
            min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
            seed=st.integers(0, 2**64 - 1),
        ),
        min_size=1,
        max_size=6,
    ),
    k=st.integers(1, 5),
    mapped=st.booleans(),
)
def test_a_cpu_equals_dense_rows(
    vocab: int,
    scale: float,
    ties: bool,
    masked: bool,
    params: list[SamplingParams],
    k: int,
    mapped: bool,
) -> None:
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    if ties:
        logits = logits.round()
    if masked:
        logits[:, ::3] = -math.inf
    token_map = torch.arange(vocab).flip(0) * 2 if mapped else None
    rows = SamplingRows.from_params(params, range(len(params)))
    k = min(k, vocab)
    dense = sampling.perturbed_top(logits, rows, k, token_map, dense=True)
    assert same(sampling.perturbed_top(logits, rows, k, token_map, dense=False), dense)
    for kernel in range(len(_kernels.KERNELS)):
        assert same(rule_cpu.perturbed_top(logits, rows, k, token_map, kernel=kernel), dense)


def test_a_cpu_equals_dense_rows_of_a_large_vocabulary() -> None:
    params = [
        SamplingParams(seed=i, temperature=0.5 + 0.5 * i, top_k=-1 if i % 2 else 30)
        for i in range(4)
    ]
    for vocab in (262144, 151936):
        for scale in (0.2, 3.0):
            logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(5)) * scale
            rows = SamplingRows.from_params(params, [9, 10, 11, 12])
            for k in (1, 4):
                dense = sampling.perturbed_top(logits, rows, k, dense=True)
                assert same(sampling.perturbed_top(logits, rows, k, dense=False), dense)


@pytest.mark.parametrize("kernel", range(len(_kernels.KERNELS)))
@pytest.mark.parametrize("vocab", [1, 3, 255, 256, 257, 700])
def test_greedy_and_broken_rows_beside_sampled_ones(vocab: int, kernel: int) -> None:
    params = [SamplingParams(temperature=t, seed=3) for t in (0.0, 1.0, 0.0, 0.7, 1.0, 0.0)]
    rows = SamplingRows.from_params(params, range(6))
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[0] = logits[0].round()  # ties: the lowest wins
    for row, number in ((2, math.nan), (3, math.inf), (4, math.nan)):
        logits[row, vocab // 2] = number
    logits[5] = -math.inf
    chosen = rule_cpu.choose(logits, rows, kernel=kernel).tolist()
    sampled = sampling.perturbed_top(logits[1:2], rows.take(slice(1, 2)), 1, dense=True)[0].item()
    assert chosen == [int(logits[0].argmax()), sampled, NO_TOKEN, NO_TOKEN, NO_TOKEN, 0]


@pytest.mark.parametrize("kernel", range(len(_kernels.KERNELS)))
@pytest.mark.parametrize("vocab", [1, 3, 255, 256, 257, 8192])
def test_greedy_rows_need_no_parameters(vocab: int, kernel: int) -> None:
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[0] = logits[0].round()  # ties: the lowest wins
    logits[1] = -math.inf
    expected = logits.argmax(-1).tolist()
    expected[0] = min(int(i) for i in (logits[0] == logits[0].max()).nonzero())
    assert rule_cpu.greedy(logits, kernel=kernel).tolist() == expected
    assert rule_cpu.greedy(logits.double().t().contiguous().t(), kernel=kernel).tolist() == expected
    for number in (math.nan, math.inf):
        logits[2, -1] = number
        assert rule_cpu.greedy(logits, kernel=kernel).tolist() == [
            *expected[:2],
            NO_TOKEN,
            *expected[3:],
        ]
    assert rule_cpu.greedy(logits[:0], kernel=kernel).tolist() == []


def test_only_a_single_choice_needs_no_temperature() -> None:
    nothing = [0] * 11
    with pytest.raises(ValueError, match="temperature"):
        _kernels.choose(*nothing, 1, 8, 8, 2, 1, 0)
    with pytest.raises(ValueError, match="temperature"):
        _kernels.choose(*nothing, 1, 8, 8, 1, 0, 0)


def test_rows_that_lie_apart_and_other_types() -> None:
    wide = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1))
    rows = SamplingRows.from_params([SamplingParams(seed=i) for i in range(4)], range(4))
    for logits in (wide[:, :300], wide[:, ::2], wide.to(torch.float64), wide.to(torch.bfloat16)):
        dense = sampling.perturbed_top(logits.float().contiguous(), rows, 3, dense=True)
        assert same(sampling.perturbed_top(logits, rows, 3, dense=False), dense)


def test_numbers_of_other_rows_are_refused() -> None:
    logits = torch.zeros(3, 10)
    rows = SamplingRows.from_params([SamplingParams()] * 2, range(2))
    with pytest.raises(ValueError, match="2"):
        sampling.choose(logits, rows)
    with pytest.raises(ValueError, match="9"):
        sampling.perturbed_top(logits[:2], rows, 1, torch.arange(9))
    with pytest.raises(ValueError, match="11"):
        sampling.perturbed_top(logits[:2], rows, 11)


@pytest.mark.parametrize("kernel", range(len(_kernels.KERNELS)))
def test_far_scores_that_are_rounded_to_equal_ones(kernel: int) -> None:
    # Scores near -1e6 are multiples of 0.0625, so a token may tie by being rounded up.
    seeds = [547, 927, 1070, 1260]
    params = [SamplingParams(temperature=1e-4, seed=seed) for seed in seeds]
    rows = SamplingRows.from_params(params, [3] * 4)
    logits = torch.full((4, 2048), -100.0)
    logits[:, 2000] = 0.0
    ranked, scores = sampling.perturbed_top(logits, rows, 2048, dense=True)
    got = rule_cpu.perturbed_top(logits, rows, 4, kernel=kernel)
    assert same(got, (ranked[:, :4], scores[:, :4]))


def test_top_p_that_sums_reach_but_for_their_rounding() -> None:
    # Half of the mass is in the first n of 2n equal tokens. The rest is as small as the rounding of
    # a sum, so what the sum is depends on its order.
    generator = torch.Generator().manual_seed(1)
    for n in (1, 2, 4) * 30:
        order = torch.randperm(64, generator=generator)
        logits = torch.full((1, 64), -math.inf)
        logits[0, order[:40]] = -33.0 - 6.0 * torch.rand(1, generator=generator)
        logits[0, order[: 2 * n]] = 0.0
        rows = SamplingRows.from_params([SamplingParams(top_p=0.5)], [3])
        results = [
            sampling.perturbed_top(logits, rows, 2 * n, dense=True),
            *(
                rule_cpu.perturbed_top(logits, rows, 2 * n, kernel=kernel)
                for kernel in range(len(_kernels.KERNELS))
            ),
        ]
        assert [int((scores > -math.inf).sum()) for _, scores in results] == [n] * len(results)


@pytest.mark.parametrize("dense", [True, False])
def test_a_top_p_that_float32_rounds_to_zero_keeps_the_best_token(dense: bool) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(top_p=1e-46, top_k=top_k) for top_k in (-1, 1, 5, 300)]
    rows = SamplingRows.from_params(params, range(4))
    columns, scores = sampling.perturbed_top(logits, rows, 2, dense=dense)
    assert torch.equal(columns[:, 0], logits.argmax(-1))
    assert (scores > -math.inf).tolist() == [[True, False]] * 4


def test_temperatures_that_are_not_above_zero_choose_greedily() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    rows = rows_for(SamplingParams(), 40)
    for temperature in (-1.0, math.nan, -0.0):
        rows.temperature = torch.full((40,), temperature)
        assert torch.equal(sampling.choose(logits, rows), logits.argmax(-1))


def test_tensors_elsewhere_are_refused() -> None:
    logits, rows = torch.zeros(2, 10), rows_for(SamplingParams(), 2)
    with pytest.raises(ValueError, match="meta"):
        sampling.choose(logits.to("meta"), rows)
    rows.seed = rows.seed.to("meta")
    with pytest.raises(ValueError, match="meta"):
        sampling.choose(logits, rows)


def test_a_row_does_not_depend_on_its_batch() -> None:
    params = [SamplingParams(temperature=0.0), *GRID[::5], SamplingParams(temperature=0.0)]
    positions = list(range(len(params)))
    for vocab in (50, 6000):
        logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(2)) * 3
        together = sampling.choose(logits, SamplingRows.from_params(params, positions)).tolist()
        alone = [
            sampling.choose(logits[i : i + 1], SamplingRows.from_params([p], [positions[i]])).item()
            for i, p in enumerate(params)
        ]
        assert together == alone


def test_logits_are_left_alone() -> None:
    logits = torch.randn(4, 5000)
    before = logits.clone()
    sampling.choose(logits, SamplingRows.from_params([SamplingParams(top_p=0.9)] * 4, range(4)))
    assert torch.equal(logits, before)


def test_log_probs() -> None:
    logits = torch.randn(3, 20)
    emitted, ids, values = sampling.log_probs(logits, torch.tensor([1, 2, 3]), 4)
    want = logits.double().log_softmax(-1)
    torch.testing.assert_close(emitted.double(), want[range(3), [1, 2, 3]], rtol=1e-5, atol=1e-5)
    assert torch.equal(ids, want.topk(4).indices)
    torch.testing.assert_close(values.double(), want.topk(4).values, rtol=1e-5, atol=1e-5)
    assert sampling.log_probs(logits, torch.tensor([1, 2, 3]), 0)[1].shape == (3, 0)


@pytest.mark.gpu
@needs_gpu
def test_the_same_tokens_on_a_gpu() -> None:
    params = [SamplingParams(temperature=0.0), *GRID]
    logits = torch.randn(len(params), 6000, generator=torch.Generator().manual_seed(3)) * 3
    positions = range(len(params))
    want = sampling.choose(logits, SamplingRows.from_params(params, positions))
    got = sampling.choose(logits.cuda(), SamplingRows.from_params(params, positions, "cuda"))
    assert got.tolist() == want.tolist()
