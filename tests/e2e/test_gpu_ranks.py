"""Two ranks on two GPUs: captured steps, prompts and two-phase steps give what transformers gives
in float32, and in 16 bits the same tokens with every draft.
"""

import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.types import SamplingParams
from testing.block_drafts import tiny_block, tiny_peagle
from testing.checkpoints import EOS, VOCAB_SIZE, make_checkpoint
from testing.draft_heads import save_head
from testing.drafts import DraftProcess, card_variables
from testing.engines import Job, running_engine
from testing.family_texts import assert_same, draft_flags, jobs, texts_of
from testing.reference import Reference
from testing.stack import eventually, long_answer, running_stack
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
CHAIN, TREE = (3, 1, 4), (4, 4, 12)
ALGORITHMS = ["NGRAM", *BUNDLED_DRAFTS]
BLOCKS = ["DFLASH", "PEAGLE"]
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


@pytest.mark.parametrize("algorithm", list(DRAFTS))
def test_two_cards_give_what_transformers_gives(tmp_path: Path, algorithm: str) -> None:
    target = make_checkpoint(tmp_path / "target")
    flags = {**FLAGS, **DRAFTS[algorithm]}
    if algorithm == "STANDALONE":
        flags["speculative_draft_model_path"] = str(make_checkpoint(tmp_path / "draft", noise=0.05))
    overlapped = OVERLAPPED_STEPS._value.get()
    with running_engine(target, algorithm, **flags) as harness:
        results = harness.run(asked())
        harness.check_nothing_left()
    cases = [
        (job.prompt, one.tokens, job.sampling) for job, one in zip(asked(), results, strict=True)
    ]
    assert Reference(target).check_all(cases, frozenset({EOS})) <= 2
    # N-grams come from the host, which must have seen the step before.
    assert OVERLAPPED_STEPS._value.get() > overlapped or algorithm == "NGRAM"
    assert sum(one.finish.accepted_tokens for one in results if one.finish) or algorithm == "NONE"


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model_path("foredraft-demo")


@pytest.fixture(scope="module")
def expected(demo: Path) -> list[list[int]]:
    return texts_of(demo, "NONE", "cpu", jobs(demo, 64), num_threads=8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_in_float32_the_text_is_the_cpus(
    demo: Path, expected: list[list[int]], algorithm: str
) -> None:
    work = jobs(demo, 64)
    flags = {"tensor_parallel_size": 2, **draft_flags(algorithm, TREE)}
    assert_same(demo, texts_of(demo, algorithm, "cuda", work, **flags), expected, work)


def test_hidden_states_through_the_hosts_memory_change_no_token(
    demo: Path, expected: list[list[int]]
) -> None:
    work = jobs(demo, 64)
    flags = {**draft_flags("EAGLE3", TREE), "require_transport": "shm"}
    got = texts_of(demo, "EAGLE3", "cuda", work, tensor_parallel_size=2, **flags)
    assert_same(demo, got, expected, work)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_a_draft_on_a_card_of_its_own_changes_no_token(
    demo: Path,
    expected: list[list[int]],
    algorithm: str,
    transport: str,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.device_count() <= ranks:
        pytest.skip("needs another card")
    monkeypatch.setattr(DraftProcess, "variables", card_variables(ranks))
    work = jobs(demo, 64)
    flags = {**draft_flags(algorithm, TREE), "require_transport": transport}
    flags["tensor_parallel_size"] = ranks
    assert_same(demo, texts_of(demo, algorithm, "cuda", work, **flags), expected, work)


def strict_jobs(demo: Path) -> list[Job]:
    """Returns jobs whose texts are compared in bfloat16."""
    work = jobs(demo, 160)
    # One prompt of more rows than ranks exchange at a time.
    longest = [token for job in work for token in job.prompt] * 6
    return [*work, Job(longest, work[0].sampling)]


def strict_texts(demo: Path, algorithm: str, **flags: Any) -> list[list[int]]:
    """Returns texts of two ranks in bfloat16."""
    flags = {"dtype": "bfloat16", "tensor_parallel_size": 2, **flags}
    return texts_of(demo, algorithm, "cuda", strict_jobs(demo), **flags)


@pytest.fixture(scope="module")
def strict(demo: Path) -> list[list[int]]:
    return strict_texts(demo, "NONE")


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_in_16_bits_speculation_changes_no_token(
    demo: Path, strict: list[list[int]], algorithm: str, shape: tuple[int, int, int]
) -> None:
    assert strict_texts(demo, algorithm, **draft_flags(algorithm, shape)) == strict


def test_several_drafts_change_no_token(demo: Path, strict: list[list[int]]) -> None:
    head = resolve_model_path(BUNDLED_DRAFTS["EAGLE3"])
    flags = {"speculative_draft_model_path": f"EAGLE3={head}"}
    assert strict_texts(demo, "NGRAM,EAGLE3", **flags) == strict


@pytest.mark.parametrize("algorithm", BLOCKS)
def test_drafts_of_blocks_change_no_token(tmp_path: Path, algorithm: str) -> None:
    target = make_checkpoint(tmp_path / "target", seed=5)
    (tmp_path / "draft").mkdir()
    head = tiny_peagle(3) if algorithm == "PEAGLE" else tiny_block(algorithm, 1)
    path = save_head(head, tmp_path / "draft")
    found = []
    for name, own in (
        ("NONE", {}),
        (algorithm, {"speculative_draft_model_path": str(path), "speculative_num_steps": 3}),
    ):
        flags = {**FLAGS, "dtype": "bfloat16", **own}
        with running_engine(target, name, **flags) as harness:
            found.append([one.tokens for one in harness.run(asked())])
            harness.check_nothing_left()
    assert found[0] == found[1]


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
    assert strict_texts(demo, "NONE", **flags) == strict


@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM", "EAGLE3"])
def test_sums_through_nccl_change_no_token(
    demo: Path, strict: list[list[int]], algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All ranks follow the one that says no.
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *cards: False)
    flags = {} if algorithm == "NONE" else draft_flags(algorithm, TREE)
    assert strict_texts(demo, algorithm, **flags) == strict


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3", "STANDALONE"])
def test_a_draft_that_is_killed_changes_no_token(
    demo: Path, strict: list[list[int]], algorithm: str
) -> None:
    flags = {
        "device": "cuda",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "max_total_tokens": 16384,
        "max_running_requests": 16,
        "draft_step_timeout": 60.0,
        **draft_flags(algorithm, TREE),
    }
    with running_engine(demo, algorithm, **flags) as harness:
        first, killed, last = harness.run_around_a_kill(strict_jobs(demo))
        harness.check_nothing_left()
    half = len(killed) // 2
    for results in (first, killed[:half], killed[half:], last):
        assert [one.tokens for one in results] == strict


@pytest.mark.parametrize("mps", [False, True])
def test_served_text_is_the_same_by_default_and_without_a_draft(demo: Path, mps: bool) -> None:
    flags = {"device": "cuda", "num_threads": None, "tensor_parallel_size": 2, "mps": mps}
    texts = []
    for own in ({"speculative_algorithm": "NONE"}, {}):
        with running_stack(demo, **flags, **own) as stack:
            texts.append(long_answer(stack.urls["http"]))
    assert texts[0] == texts[1]


def seconds(url: str) -> dict[str, float]:
    """Returns the seconds of steps, and of each rank by part."""
    time.sleep(2)  # until what ranks have counted is on the page
    metrics = httpx.get(f"{url}/dashboard/figures", timeout=60).json()["metrics"]
    return {"steps": metrics["step_seconds_sum"], **metrics.get("rank_seconds_total", {})}


def test_each_cards_time_is_told_by_parts(demo: Path) -> None:
    flags = {"device": "cuda", "num_threads": None, "tensor_parallel_size": 2}
    with running_stack(demo, speculative_algorithm="NONE", **flags) as stack:
        url = stack.urls["http"]
        long_answer(url)
        eventually(lambda: seconds(url) == seconds(url))  # nothing is captured any more
        long_answer(url)  # tells what was before it
        before = seconds(url)
        for _ in range(3):
            long_answer(url)
        after = seconds(url)
    grown = {part: after[part] - before[part] for part in after}
    for rank in ("0", "1"):
        parts = grown[f"{rank} products"], grown[f"{rank} all_reduce"]
        assert min(parts) > 0
        assert sum(parts) < grown["steps"]
