"""Rotary embeddings that follow the length (dynamic NTK), served beyond the trained length as
transformers generates.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.engines import Job, running_engine

TRAINED, FACTOR, LENGTH = 32, 4.0, 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": FACTOR}
    directory = tmp_path_factory.mktemp("dynamic") / "target"
    return make_checkpoint(directory, max_position_embeddings=TRAINED, rope_parameters=rope)


def generated(path: Path, prompt: list[int]) -> list[int]:
    """By a model just loaded, as one that has seen a longer text keeps its frequencies."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=LENGTH,
            min_new_tokens=LENGTH,
            do_sample=False,
        )
    return list(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_texts_are_transformers_whatever_was_cached(checkpoint: Path, algorithm: str) -> None:
    """Prompts that begin alike, below and above the trained length, several times and together."""
    text = [5, 6, 7, 8, 9, 10, 11] * 12
    prompts = [text[:length] for length in (20, 32, 33, 48, 64, 80)]
    sampling = SamplingParams(
        temperature=0.0, max_new_tokens=LENGTH, min_new_tokens=LENGTH, ignore_eos=False
    )
    want = [generated(checkpoint, prompt) for prompt in prompts]
    with running_engine(
        checkpoint, algorithm, page_size=8, chunked_prefill_size=24, max_running_requests=4
    ) as harness:
        assert harness.engine.limits.context_length == TRAINED * FACTOR
        harness.engine.draft_everything()
        for _ in range(2):
            results = harness.run([Job(prompt, sampling) for prompt in prompts])
            assert [result.tokens for result in results] == want
        cached = [result.finish.cached_tokens for result in results if result.finish]
        assert cached[1] > 0
        assert cached[2:] == [0] * 4
        harness.check_nothing_left()
