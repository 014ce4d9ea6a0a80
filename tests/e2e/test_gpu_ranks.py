"""Two ranks on two GPUs: captured steps, prompts and two-phase steps give what transformers gives
in float32, and in 16 bits the same tokens with every draft.
"""

import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from foredraft.config.services import VerifyConfig
from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.types import SamplingParams
from testing.checkpoints import EOS, VOCAB_SIZE, make_checkpoint
from testing.engines import Job, running_engine
from testing.family_texts import assert_same, draft_flags, jobs, plain_jobs, texts_of
from testing.reference import Reference
from verify_service.metrics import OVERLAPPED_STEPS

T = TypeVar("T")
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


def asked() -> list[Job]:
    rng = random.Random(3)
    made = []
    for i in range(24):
        part = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
        sampling = {"max_new_tokens": 12 + 2 * i, "seed": i, **ASKED[i % len(ASKED)]}
        made.append(Job(part * rng.randrange(1, 9), SamplingParams(**sampling)))
    return made


def in_child(run: Callable[..., T], *arguments: Any, **flags: Any) -> T:
    """Runs a function in a process of its own: a process shares memory with ranks once."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(allow_every_draft).result()
        return pool.submit(run, *arguments, **flags).result()


def allow_every_draft() -> None:
    """Takes the refusal of drafts away that have not passed here yet."""
    VerifyConfig.check_gpus = lambda *arguments: None  # type: ignore[method-assign]


def answers(target: Path, algorithm: str, **flags: Any) -> tuple[list[list[int]], int, float]:
    """Returns texts of all jobs, accepted tokens, and steps that were overlapped."""
    with running_engine(target, algorithm, **flags) as harness:
        results = harness.run(asked())
        harness.check_nothing_left()
    accepted = sum(one.finish.accepted_tokens for one in results if one.finish)
    return [one.tokens for one in results], accepted, OVERLAPPED_STEPS._value.get()


@pytest.mark.parametrize("algorithm", list(DRAFTS))
def test_two_cards_give_what_transformers_gives(tmp_path: Path, algorithm: str) -> None:
    target = make_checkpoint(tmp_path / "target")
    flags = {**FLAGS, **DRAFTS[algorithm]}
    if algorithm == "STANDALONE":
        flags["speculative_draft_model_path"] = str(make_checkpoint(tmp_path / "draft", noise=0.05))
    texts, accepted, overlapped = in_child(answers, target, algorithm, **flags)
    cases = [(job.prompt, text, job.sampling) for job, text in zip(asked(), texts, strict=True)]
    assert Reference(target).check_all(cases, frozenset({EOS})) <= 2
    assert overlapped
    assert accepted or algorithm == "NONE"


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model_path("foredraft-demo")


@pytest.fixture(scope="module")
def expected(demo: Path) -> list[list[int]]:
    return texts_of(demo, "NONE", "cpu", plain_jobs(demo, 64, 8), num_threads=8)


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_drafts_on_rank_0s_card_change_no_token(
    demo: Path, expected: list[list[int]], algorithm: str, transport: str
) -> None:
    work = plain_jobs(demo, 64, 8)
    flags = {**draft_flags(algorithm, (4, 4, 12)), "require_transport": transport}
    got = in_child(texts_of, demo, algorithm, "cuda", work, tensor_parallel_size=2, **flags)
    assert_same(demo, got, expected, work)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_a_draft_on_a_card_of_its_own_changes_no_token(
    demo: Path, expected: list[list[int]], algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.init()  # what this process sees stays as it is
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    work = plain_jobs(demo, 64, 8)
    flags = {**draft_flags(algorithm, (4, 4, 12)), "require_transport": "shm"}
    assert_same(demo, texts_of(demo, algorithm, "cuda", work, **flags), expected, work)


def strict_texts(demo: Path, algorithm: str, **flags: Any) -> list[list[int]]:
    """Returns texts of two ranks in bfloat16."""
    work = jobs(demo, 160)
    # One prompt whose rows do not all fit the memory that the ranks exchange small sums through.
    longest = [token for job in work for token in job.prompt] * 6
    work.append(Job(longest, work[0].sampling))
    return texts_of(
        demo, algorithm, "cuda", work, dtype="bfloat16", tensor_parallel_size=2, **flags
    )


@pytest.fixture(scope="module")
def strict(demo: Path) -> list[list[int]]:
    return in_child(strict_texts, demo, "NONE")


@pytest.mark.parametrize("shape", [(3, 1, 4), (5, 4, 16)], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ["NGRAM", *BUNDLED_DRAFTS])
def test_in_16_bits_speculation_changes_no_token(
    demo: Path, strict: list[list[int]], algorithm: str, shape: tuple[int, int, int]
) -> None:
    flags = draft_flags(algorithm, shape)
    assert in_child(strict_texts, demo, algorithm, **flags) == strict


@pytest.mark.parametrize(
    "flags",
    [
        {"max_running_requests": 1},
        {"disable_cuda_graph": True},
        {"chunked_prefill_size": 24, "max_running_requests": 6},
    ],
    ids=["alone", "eager", "small chunks"],
)
def test_in_16_bits_steps_change_no_token(
    demo: Path, strict: list[list[int]], flags: dict[str, Any]
) -> None:
    assert in_child(strict_texts, demo, "NONE", **flags) == strict


def test_sums_through_nccl_change_no_token(
    demo: Path, strict: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # All ranks follow the one that says no.
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *cards: False)
    assert strict_texts(demo, "NONE") == strict
