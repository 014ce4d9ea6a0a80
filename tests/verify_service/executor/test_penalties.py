"""Penalties against a per-token reference, along the paths of a tree."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.types import SamplingParams
from testing.speculation_reference import penalised
from verify_service.executor.choice.penalties import PenaltyState, needed

VOCAB = 24
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@settings(max_examples=80)
@given(
    params=st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
        presence_penalty=st.sampled_from([0.0, 0.8]),
        logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
        min_new_tokens=st.integers(0, 4),
        stop_token_ids=st.sampled_from([(), (3,), (1, 2)]),
    ),
    prompt=tokens,
    committed=st.lists(tokens, max_size=3),
    paths=st.lists(tokens, min_size=1, max_size=5),
)
def test_rows_match_the_reference(
    params: SamplingParams, prompt: list[int], committed: list[list[int]], paths: list[list[int]]
) -> None:
    state = PenaltyState(params, prompt, VOCAB, eos_token_ids=[7])
    output: list[int] = []
    for part in committed:
        state.commit(part)
        output += part
    raw = torch.randn(len(paths), VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    got = state.apply_(raw.clone(), paths, [len(output) + len(path) for path in paths])
    for row, path in enumerate(paths):
        want = penalised(
            raw[row].numpy(), params, prompt, output + path, {7, *params.stop_token_ids}
        )
        np.testing.assert_allclose(got[row].numpy(), want, rtol=1e-5, atol=1e-5)


def test_applying_does_not_commit() -> None:
    state = PenaltyState(SamplingParams(frequency_penalty=1.0), [], VOCAB)
    state.apply_(torch.zeros(2, VOCAB), [[], [4]], [0, 1])
    assert not state.apply_(torch.zeros(1, VOCAB), [[]], [0]).any()


def test_the_least_repetition_penalty_leaves_logits_finite() -> None:
    state = PenaltyState(SamplingParams(repetition_penalty=1e-320), [1, 2], 3)
    logits = state.apply_(torch.tensor([[5.0, 2000.0, -3.0]]), [[]], [0])
    assert bool(logits.isfinite().all())
    assert logits.argmax() == 1


def test_a_long_history_grows_the_state() -> None:
    state = PenaltyState(SamplingParams(repetition_penalty=2.0), range(500), 1000)
    state.commit(range(700, 800))
    logits = state.apply_(torch.ones(1, 1000), [[]], [100])
    assert (logits[0] == 0.5).nonzero()[:, 0].tolist() == [*range(500), *range(700, 800)]


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, min_new_tokens=1)
    state = PenaltyState(params, [-1, VOCAB, 2**40], VOCAB, eos_token_ids=[VOCAB + 3])
    state.commit([-5, 2**40])
    assert not state.apply_(torch.zeros(1, VOCAB), [[VOCAB, -1]], [0]).any()


def test_needed() -> None:
    assert not needed(SamplingParams(temperature=0.5, top_p=0.5, seed=3))
    assert needed(SamplingParams(repetition_penalty=1.1))
    assert needed(SamplingParams(frequency_penalty=-0.1))
    assert needed(SamplingParams(presence_penalty=0.1))
    assert needed(SamplingParams(logit_bias={1: 2.0}))
    assert needed(SamplingParams(min_new_tokens=1))
