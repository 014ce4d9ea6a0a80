"""Sampling parameters on their way from the gateway to the engine."""

import numpy as np
import pytest

from foredraft.types import Grammar, GrammarKind, SamplingParams
from gateway.generation import Job, _submit_request
from verify_service.messages import engine_request

SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


@pytest.mark.parametrize(
    "given",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_p=0.5, top_k=7, min_p=0.25, seed=2**64 - 1),
        SamplingParams(repetition_penalty=0.5, frequency_penalty=-2, presence_penalty=1.5),
        SamplingParams(logit_bias={3: -100, 5: 0.5}, stop_token_ids=(4, 2), ignore_eos=True),
        SamplingParams(max_new_tokens=3, min_new_tokens=2, logprobs=0),
        SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a+"), logprobs=5),
    ],
)
def test_they_arrive_as_they_were_sent(given: SamplingParams) -> None:
    assert _sent(given) == given


def test_what_is_nearly_0_is_not_taken_for_left_out() -> None:
    sent = _sent(SamplingParams(top_p=1e-300, repetition_penalty=1e-300))
    assert sent.top_p == SMALLEST
    assert sent.repetition_penalty == SMALLEST


def _sent(sampling: SamplingParams) -> SamplingParams:
    job = Job("name", [1], sampling)
    return engine_request(_submit_request(job, 0), "", lambda outputs, load: None).sampling
