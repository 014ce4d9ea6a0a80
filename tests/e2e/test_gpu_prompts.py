"""Prompts on a GPU, in captured forwards beside sequences that decode, against the CPU's texts in
float32.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.models.registry import resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.engines import Job
from testing.family_texts import assert_same, texts_of
from testing.triton_device import needs_gpu
from verify_service.engine.overlap import OverlapScheduler
from verify_service.executor.captured.mixed import MixedGraphs

pytestmark = [pytest.mark.gpu, needs_gpu]
TEXTS = Path(__file__).parents[2] / "benchmarks" / "accept_length_prompts.json"
TREE = {
    "speculative_draft_model_path": "foredraft-demo-eagle3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 8,
}


def long_and_short(path: Path, longest: int = 900) -> list[Job]:
    """Some prompts of many parts, and short ones whose sequences decode meanwhile."""
    texts = json.loads(TEXTS.read_text())
    tokens = [token for text in texts for token in Tokenizer.from_dir(path).encode(text)]
    made, first = [], 0
    for seed, length in enumerate((longest, 5, 40, 333, 64, 65, 1, longest - 200)):
        sampling = SamplingParams(
            temperature=float(seed % 2), seed=seed, max_new_tokens=40, ignore_eos=True
        )
        made.append(Job(tokens[first : first + length], sampling))
        first += length
    return made


@pytest.mark.parametrize(("chunk", "longest"), [(64, 900), (1536, 1900), (8192, 1900)])
@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
def test_prompts_of_any_length(algorithm, chunk, longest, monkeypatch):
    taken = []
    takes = MixedGraphs.takes

    def counted(self, rows):
        taken.append(takes(self, rows))
        return taken[-1]

    monkeypatch.setattr(MixedGraphs, "takes", counted)
    path = resolve_model_path("foredraft-demo")
    flags = TREE if algorithm == "EAGLE3" else {}
    work = long_and_short(path, longest)
    got = texts_of(path, algorithm, "cuda", work, chunked_prefill_size=chunk, **flags)
    assert taken
    if chunk <= 1536:
        assert all(taken)
    else:
        assert not all(taken)  # all prompts together are more rows than are captured
    assert_same(path, got, texts_of(path, "NONE", "cpu", work, chunked_prefill_size=chunk), work)


def few_at_a_time(path: Path) -> list[Job]:
    """Jobs that end one after the other."""
    return [
        replace(job, sampling=replace(job.sampling, max_new_tokens=20 + 7 * (i % 5)))
        for i, job in enumerate(2 * long_and_short(path))
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    path = resolve_model_path("foredraft-demo")
    return texts_of(path, "NONE", "cpu", few_at_a_time(path))


@pytest.mark.parametrize("chunk", [128, 2048])
@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
def test_prompts_behind_running_steps_change_no_token(algorithm, chunk, expected, monkeypatch):
    """Few sequences run at a time, so most prompts begin while others decode."""
    behind = []
    compute_behind = OverlapScheduler.compute_behind

    def counted(self, running, chunks):
        behind.append(len(chunks))
        return compute_behind(self, running, chunks)

    monkeypatch.setattr(OverlapScheduler, "compute_behind", counted)
    path = resolve_model_path("foredraft-demo")
    flags = {"chunked_prefill_size": chunk, "max_running_requests": 3}
    flags |= TREE if algorithm == "EAGLE3" else {}
    work = few_at_a_time(path)
    got = texts_of(path, algorithm, "cuda", work, **flags)
    assert behind
    assert_same(path, got, expected, work)
