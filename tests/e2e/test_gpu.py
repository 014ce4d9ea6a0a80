"""The GPU path against the CPU's: captured graphs, Triton kernels and drafts on the device, in float32."""

from pathlib import Path

import pytest
import torch

from foredraft.config.options import to_flags
from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from tests.support.checkpoints import ARCHITECTURES, make_checkpoint
from tests.support.drafts import DraftProcess
from tests.support.engines import Job, running_engine
from tests.support.ties import first_difference, gap_between
from verify_service.metrics import OVERLAPPED_STEPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TEXTS = (
    "def quicksort(values):\n    ",
    "The engine owns a thread. The engine",
    "import os\nimport sys\n\n\ndef main():\n",
    "Once upon a time there was",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
)
FILTERS: dict[int, dict[str, float]] = {
    1: {"top_p": 0.9},
    3: {"top_k": 40, "top_p": 0.95, "min_p": 0.02},
    4: {"top_k": 20},
}


def plain_jobs(path: Path, num_tokens: int = 48, spread: int = 0) -> list[Job]:
    """Jobs that need no host to choose their tokens, some with filters; they end `spread` tokens one after the other."""
    tokenizer = Tokenizer.from_dir(path)
    made = []
    for i, text in enumerate(TEXTS):
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(
                temperature=temperature,
                seed=i,
                max_new_tokens=num_tokens + spread * len(made),
                ignore_eos=True,
                **(FILTERS.get(i, {}) if temperature else {}),
            )
            made.append(Job(tokenizer.encode(text), sampling))
    return made


def jobs(path: Path, num_tokens: int = 48) -> list[Job]:
    made = plain_jobs(path, num_tokens)
    filtered = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=40, seed=7, max_new_tokens=num_tokens, logprobs=2
    )
    punished = SamplingParams(
        temperature=0.7, repetition_penalty=1.2, seed=8, max_new_tokens=num_tokens
    )
    return [*made, Job(made[0].prompt, filtered), Job(made[2].prompt, punished)]


def texts_of(
    path: Path, algorithm: str, device: str, work: list[Job] | None = None, **flags
) -> list[list[int]]:
    settings = {
        "device": device,
        "dtype": "float32",
        "max_total_tokens": 16384,
        "max_running_requests": 16,
        "draft_step_timeout": 60.0,
        **flags,
    }
    with running_engine(path, algorithm, **settings) as harness:
        results = harness.run(work or jobs(path), timeout=300)
        assert all(result.finish is not None for result in results)
        harness.check_nothing_left()
        if algorithm != "NONE":
            assert sum(result.finish.accepted_tokens for result in results if result.finish) > 0
        return [result.tokens for result in results]


def draft_flags(algorithm: str, shape: tuple[int, int, int]) -> dict[str, object]:
    """Flags for a bundled draft and trees of so many steps, topk and tokens."""
    steps, topk, tokens = shape
    if algorithm == "NGRAM":
        return {"speculative_num_draft_tokens": tokens}
    return {
        "speculative_draft_model_path": str(resolve_model_path(BUNDLED_DRAFTS[algorithm])),
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": tokens,
    }


def assert_same(
    path: Path, got: list[list[int]], expected: list[list[int]], work: list[Job] | None = None
) -> None:
    """Equal, but where two tokens are within rounding of each other, at most once."""
    ties = 0
    for job, ours, theirs in zip(work or jobs(path), got, expected, strict=True):
        if ours != theirs:
            at = first_difference(ours, theirs)
            assert at is not None
            before = [*job.prompt, *theirs[:at]]
            gap = gap_between(path, before, job.sampling, ours[at], theirs[at])
            assert gap < 1e-4, f"token {at} of {job.prompt[:5]}...: a gap of {gap}"
            ties += 1
    assert ties <= 1


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model_path("foredraft-demo")


@pytest.fixture(scope="module")
def expected(demo: Path) -> list[list[int]]:
    return texts_of(demo, "NONE", "cpu")


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_plain_decoding_equals_the_cpus(demo, expected, graphs):
    assert_same(demo, texts_of(demo, "NONE", "cuda", disable_cuda_graph=not graphs), expected)


@pytest.mark.parametrize("shape", [(3, 1, 4), (4, 4, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ["NGRAM", *BUNDLED_DRAFTS])
def test_speculation_changes_no_token(demo, expected, algorithm, shape):
    flags = draft_flags(algorithm, shape)
    assert_same(demo, texts_of(demo, algorithm, "cuda", **flags), expected)


@pytest.fixture(scope="module")
def expected_of_long(demo: Path) -> list[list[int]]:
    return texts_of(demo, "NONE", "cpu", plain_jobs(demo, 64, 8))


@pytest.mark.parametrize("shape", [(3, 1, 4), (4, 4, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ["NONE", "STANDALONE", "EAGLE3", "EAGLE", "MTP"])
def test_steps_that_run_ahead_change_no_token(demo, expected_of_long, algorithm, shape):
    flags = {}
    if algorithm != "NONE":
        flags = {**draft_flags(algorithm, shape), "require_transport": "cuda_ipc"}
    work = plain_jobs(demo, 64, 8)
    before = OVERLAPPED_STEPS._value.get()
    got = texts_of(demo, algorithm, "cuda", work, **flags)
    # Sequences end one after the other, and each end is found out one step late.
    assert OVERLAPPED_STEPS._value.get() - before > 20
    assert_same(demo, got, expected_of_long, work)


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3"])
def test_adaptive_speculation_changes_no_token(demo, expected_of_long, algorithm):
    work = plain_jobs(demo, 64, 8)
    flags = draft_flags(algorithm, (5, 4, 16))
    got = texts_of(demo, algorithm, "cuda", work, speculative_adaptive=True, **flags)
    assert_same(demo, got, expected_of_long, work)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
def test_a_draft_that_comes_after_the_start_is_verified(demo, expected, algorithm, adaptive):
    flags = {"device": "cuda", "dtype": "float32"}
    if algorithm != "NGRAM":
        flags["speculative_draft_model_path"] = BUNDLED_DRAFTS[algorithm]
    target = {"model_path": str(demo), "speculative_algorithm": algorithm}
    draft = DraftProcess(*to_flags(flags | target))
    settings = {
        **flags,
        "draft": (draft.target,),
        "draft_wait": 0.1,
        "draft_step_timeout": 60.0,
        "max_total_tokens": 16384,
        "max_running_requests": 16,
        "speculative_adaptive": adaptive,
    }
    with running_engine(demo, algorithm, wait=False, **settings) as harness:
        assert_same(demo, [result.tokens for result in harness.run(jobs(demo))], expected)
        with draft:
            harness.wait_for_draft()
            for _ in range(3):
                results = harness.run(jobs(demo), timeout=300)
                assert_same(demo, [result.tokens for result in results], expected)
            accepted = sum(result.finish.accepted_tokens for result in results)
            assert accepted > 0 or adaptive
            harness.check_nothing_left()


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_every_architecture_equals_the_cpus(architecture, tmp_path):
    path = make_checkpoint(tmp_path, architecture)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    prompts = [[(7 * i + j * j) % 97 for j in range(5 + 9 * i)] for i in range(4)]

    def run(device: str, **flags) -> list[list[int]]:
        settings = {"device": device, "dtype": "float32", "chunked_prefill_size": 16, **flags}
        with running_engine(path, "NONE", **settings) as harness:
            return [r.tokens for r in harness.run([Job(p, sampling) for p in prompts])]

    assert run("cuda") == run("cpu")
