"""Two ranks on two GPUs: captured steps, prompts and two-phase steps give what transformers gives,
in float32.

A verifier refuses ranks on GPUs until this has passed on a machine with two; here the refusal is
taken away.
"""

import random
from pathlib import Path

import pytest
import torch

from foredraft.config.services import VerifyConfig
from foredraft.types import SamplingParams
from testing.checkpoints import EOS, VOCAB_SIZE, make_checkpoint
from testing.engines import Job, running_engine
from testing.reference import Reference
from verify_service.metrics import OVERLAPPED_STEPS

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
pytestmark = [pytest.mark.gpu, needs_two]
FLAGS = {
    "device": "cuda",
    "dtype": "float32",
    "tensor_parallel_size": 2,
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
}
DRAFTS = {
    "NONE": {},
    "NGRAM": {"speculative_num_draft_tokens": 6},
    "STANDALONE": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 7,
    },
}
ASKED = (
    {"temperature": 0.0},
    {},
    {"top_p": 0.8, "top_k": 20},
    {"repetition_penalty": 1.3, "logprobs": 2},
    {"logit_bias": {7: 3.0}, "temperature": 0.0},
)


def jobs() -> list[Job]:
    rng = random.Random(3)
    made = []
    for i in range(24):
        part = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
        asked = {"max_new_tokens": 12 + 2 * i, "seed": i, **ASKED[i % len(ASKED)]}
        made.append(Job(part * rng.randrange(1, 9), SamplingParams(**asked)))
    return made


@pytest.mark.parametrize("algorithm", list(DRAFTS))
def test_two_cards_give_what_transformers_gives(
    tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VerifyConfig, "check_devices", lambda config, is_gpu: None)
    target = make_checkpoint(tmp_path / "target")
    flags = {**FLAGS, **DRAFTS[algorithm]}
    if algorithm == "STANDALONE":
        flags["speculative_draft_model_path"] = str(make_checkpoint(tmp_path / "draft", noise=0.05))
    overlapped = OVERLAPPED_STEPS._value.get()
    with running_engine(target, algorithm, **flags) as harness:
        results = harness.run(jobs())
        harness.check_nothing_left()
    assert OVERLAPPED_STEPS._value.get() > overlapped
    cases = [
        (job.prompt, one.tokens, job.sampling) for job, one in zip(jobs(), results, strict=True)
    ]
    assert Reference(target).check_all(cases, frozenset({EOS})) <= 2
    if algorithm != "NONE":
        assert sum(one.finish.accepted_tokens for one in results if one.finish) > 0
