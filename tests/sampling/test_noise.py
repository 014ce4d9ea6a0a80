"""The position-keyed noise: its integers, its distribution, its independence."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from foredraft.sampling import noise, seeds
from testing.triton_device import needs_gpu

MASK32 = 2**32 - 1
MASK64 = 2**64 - 1


def reference_h32(seed: int, position: int, token: int, stream: int = noise.GUMBEL_STREAM) -> int:
    """The recipe of the module's docstring in unbounded integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        return z ^ (z >> 31)

    key = mix((mix((seed + stream) & MASK64) + position * 0x9E3779B97F4A7C15) & MASK64)
    x = token ^ (key & MASK32)
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & MASK32
    x = ((x ^ (x >> 11)) * 0xAC4C1B51) & MASK32
    x ^= key >> 32
    x = ((x ^ (x >> 15)) * 0x31848BAB) & MASK32
    return x ^ (x >> 14)


def h32(seed: torch.Tensor, position: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
    k0, k1 = noise.row_keys(seed, position)
    hashed = noise.hash_tokens(k0[:, None], k1[:, None], tokens.to(torch.int32))
    return hashed.numpy().view(np.uint32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_integers_follow_the_recipe() -> None:
    all_seeds = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    positions = [0, 1, 17, 131071, 2**31, 5]
    tokens = [0, 1, 2, 50000, 262143, 2**31 - 1]
    got = h32(ints(*map(seeds.to_int64, all_seeds)), ints(*positions), ints(*tokens))
    for row, (seed, position) in enumerate(zip(all_seeds, positions, strict=True)):
        assert [int(x) for x in got[row]] == [reference_h32(seed, position, v) for v in tokens]


def test_gumbel_follows_the_recipe() -> None:
    got = noise.gumbel(ints(42), ints(7), torch.arange(2000))[0]
    for token in range(0, 2000, 37):
        w = np.float32((np.float32(reference_h32(42, 7, token)) + np.float32(0.5)) * 2.0**-32)
        want = -math.log(-math.log1p(-min(float(w), 1 - 2.0**-24)))
        assert got[token].item() == np.float32(want)


def test_gumbel_takes_tokens_per_row() -> None:
    tokens = torch.tensor([[3, 5], [5, 3]])
    got = noise.gumbel(ints(1, 1), ints(9, 9), tokens)
    assert torch.equal(got[0], got[1].flip(0))
    assert torch.equal(got[0], noise.gumbel(ints(1), ints(9), tokens[0])[0])


def test_gumbel_is_bounded_and_decreases_with_the_hash() -> None:
    extremes = noise.gumbel_of_hash(
        torch.tensor([0, 1, 2**31 - 1, -(2**31), -2, -1], dtype=torch.int32)
    )
    assert extremes[0].item() == pytest.approx(-math.log(-math.log1p(-(2.0**-33))), rel=1e-6)
    assert extremes[-1].item() == pytest.approx(-math.log(-math.log(2**-24)), rel=1e-6)
    assert (extremes.diff() <= 0).all()


@pytest.mark.parametrize("shift", [0, 12, 24], ids=["low", "middle", "high"])
def test_bits_are_uniform(shift: int) -> None:
    n = 64
    grid = h32(torch.arange(n).repeat_interleave(n), torch.arange(n).repeat(n), torch.arange(64))
    counts = np.bincount((grid.ravel() >> shift) & 0xFF, minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("shift", [0, 28], ids=["low", "high"])
@pytest.mark.parametrize(
    "step",
    [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, -1, 0), (0, 1, 1), (0, 4, 0), (2**32, 0, 0)],
)
def test_neighbours_are_independent(step: tuple[int, int, int], shift: int) -> None:
    n = 24
    seed, position = torch.arange(n).repeat_interleave(n) * 3, torch.arange(n).repeat(n) * 3 + 5
    tokens = torch.arange(256) * 2
    here = h32(seed, position, tokens).ravel()
    there = h32(seed + step[0], position + step[1], tokens + step[2]).ravel()
    joint = np.bincount((((here >> shift) & 15) << 4) | ((there >> shift) & 15), minlength=256)
    assert stats.chisquare(joint).pvalue > 1e-4
    assert abs(np.corrcoef(here, there)[0, 1]) < 5 / math.sqrt(here.size)


def test_noise_is_standard_gumbel() -> None:
    sample = (
        noise.gumbel(torch.arange(100), torch.arange(100) * 7, torch.arange(1000)).numpy().ravel()
    )
    assert stats.kstest(sample, stats.gumbel_r.cdf).pvalue > 1e-3


def test_the_largest_noise_of_a_row_is_a_shifted_gumbel() -> None:
    # What decides over tokens: the maximum over n tokens is Gumbel with location log n.
    best = noise.gumbel(torch.arange(3000), torch.full((3000,), 11), torch.arange(512)).amax(-1)
    assert stats.kstest(best.numpy() - math.log(512), stats.gumbel_r.cdf).pvalue > 1e-3


def test_coins_are_uniform_and_of_another_stream() -> None:
    seed, position = torch.arange(20000), torch.arange(20000) % 100
    coin = noise.coins(seed, position).numpy()
    assert stats.kstest(coin, "uniform").pvalue > 1e-3
    other = noise.gumbel(seed, position, ints(0))[:, 0].numpy()
    assert abs(stats.spearmanr(coin, other).statistic) < 5 / math.sqrt(20000)


def test_seeds_of_choices_differ() -> None:
    derived = {
        seeds.derive_seed(seed, choice) for seed in (0, 1, 2**64 - 1) for choice in range(50)
    }
    assert len(derived) == 150
    assert all(0 <= seed < 2**64 for seed in derived)


def test_drawn_seeds_are_numbers_that_javascript_keeps() -> None:
    drawn = {seeds.random_seed() for _ in range(50)}
    assert len(drawn) == 50
    assert all(0 <= seed < 2**53 for seed in drawn)
    assert max(drawn) > 2**46  # so that two requests hardly ever share one


def test_seeds_of_choices_stay_what_they_are() -> None:
    # A change here changes the text of every seeded request with several choices.
    # The published generator's first outputs for the seed 1234567 (Vigna's splitmix64.c).
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    golden = 0x9E3779B97F4A7C15
    assert [seeds.mix64(1234567 + i * golden) for i in (1, 2, 3)] == published
    # Choice i takes output i of the generator that the request's first output seeds.
    assert seeds.derive_seed(1234567, 0) == seeds.mix64(published[0] + golden)
    pinned = [
        12035550249420947055,
        12935080325729570654,
        18074882946671919669,
        1952936728445087881,
        13352828336997090855,
    ]
    asked = [(0, 0), (0, 1), (5, 0), (5, 1), (MASK64, 7)]
    assert [seeds.derive_seed(seed, choice) for seed, choice in asked] == pinned


def test_to_int64_keeps_the_bits() -> None:
    for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        assert seeds.to_int64(seed) % 2**64 == seed
        assert -(2**63) <= seeds.to_int64(seed) < 2**63


def test_integers_stay_what_they_are() -> None:
    # A change here changes the text of every seeded request.
    assert h32(ints(1234), ints(56), ints(0, 1, 78)).tolist() == [
        [2487128142, 3463576549, 3324119334]
    ]


@pytest.mark.gpu
@needs_gpu
def test_the_same_noise_on_a_gpu() -> None:
    seed, position = torch.arange(64) * 0x123456789ABC - 2**40, torch.arange(64) * 1001
    tokens = torch.arange(0, 262144, 7)
    host = h32(seed, position, tokens)
    k0, k1 = noise.row_keys(seed.cuda(), position.cuda())
    device = noise.hash_tokens(k0[:, None], k1[:, None], tokens.cuda().to(torch.int32)).cpu()
    assert np.array_equal(host, device.numpy().view(np.uint32))
    want = noise.gumbel(seed, position, tokens)
    got = noise.gumbel(seed.cuda(), position.cuda(), tokens.cuda()).cpu()
    assert (
        (got - want).abs() <= 2 * torch.finfo(torch.float32).eps * want.abs().clamp_min(1)
    ).all()
