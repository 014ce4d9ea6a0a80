"""Tests how much is drafted for a load that stays as it is: hardly ever slower than plain decoding,
near the best fixed setting.

In a model of steps (`testing.step_model`) whose times are tables of an H200 and of a CPU; nothing
here reads a clock.
"""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testing.controllers import CPU_CHAIN, GPU_CHAIN, GPU_TREE, run
from testing.policy_simulation import Load
from testing.rounds import rounds
from testing.step_model import StepModel


@pytest.mark.parametrize("acceptance", rounds([0.1, 0.3, 0.7], [0.1, 0.3, 0.5, 0.7, 0.9]))
@pytest.mark.parametrize("batch", rounds([1, 8, 32, 64], [1, 4, 8, 16, 32, 64]))
def test_a_chain_on_a_gpu_is_near_the_best_setting(batch: int, acceptance: float) -> None:
    # Of few sequences, what happens to be accepted varies much.
    seconds = 8.0 if batch > 4 else 16.0
    trace = run(GPU_CHAIN, [Load(0, batch, (acceptance, acceptance))], seconds)
    assert trace.of_plain(2.0, seconds) > 0.97
    assert trace.of_best(2.0, seconds, acceptance) > 0.95


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_tree_on_a_gpu_is_cut_to_what_pays(batch: int, acceptance: float) -> None:
    seconds = 8.0 if batch > 1 else 16.0  # of one sequence, what happens to be accepted varies much
    trace = run(GPU_TREE, [Load(0, batch, (acceptance, acceptance))], seconds)
    assert trace.of_plain(2.0, seconds) > 0.97
    assert trace.of_best(2.0, seconds, acceptance) > 0.95
    if batch == 32:  # what always drafting the whole tree would cost
        assert trace.rate(2.0, seconds) > trace.fixed_rate(2.0, seconds, 31, acceptance)


@pytest.mark.parametrize("acceptance", rounds([0.1, 0.5], [0.1, 0.3, 0.5, 0.7]))
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_cpu_is_hardly_slower_than_plainly(batch: int, acceptance: float) -> None:
    load = [Load(0, batch, (acceptance, acceptance))]
    traces = [run(CPU_CHAIN, load, 40.0, seed) for seed in range(3)]
    assert statistics.mean(one.of_plain(4.0, 40.0) for one in traces) > 0.965
    assert statistics.mean(one.of_best(4.0, 40.0, acceptance) for one in traces) > 0.94


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from([GPU_CHAIN, GPU_TREE]),
    st.integers(1, 48),
    st.floats(0.0, 0.95),
    st.floats(0.0, 0.95),
    st.integers(0, 1000),
)
def test_mixed_sequences_and_a_wrong_table(
    model: StepModel, batch: int, one: float, other: float, seed: int
) -> None:
    low, high = sorted((one, other))
    trace = run(model, [Load(0, batch, (low, high))], 3.0, seed, error=0.1)
    assert trace.of_plain(1.0, 3.0) > 0.93
