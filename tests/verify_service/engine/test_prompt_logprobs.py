"""Log-probabilities of prompts from a real engine against transformers, however the prompt is cut,
cached or preempted.
"""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.errors import InvalidRequest, PromptTooLong
from foredraft.types import SamplingParams
from testing.checkpoints import VOCAB_SIZE, make_checkpoint
from testing.engines import Harness, Job, Result, running_engine
from verify_service.executor.choice.scoring import SCORED_AT_ONCE
from verify_service.outputs import TokenLogprob

ARCHITECTURES = ("LlamaForCausalLM", "Gemma3ForCausalLM")
# Twice what float32 itself is off by here: transformers in float32 against float64.
TOLERANCE = 1e-4
SMALL = {"page_size": 8, "max_total_tokens": 1024, "max_running_requests": 4}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param) / "target", request.param)


@pytest.fixture(scope="module")
def expected(target: Path) -> Iterator[list[torch.Tensor]]:
    """float64 [tokens, vocab] of each prompt: row i has what is said of token i + 1."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
    with torch.no_grad():
        yield [model(torch.tensor([one])).logits[0].log_softmax(-1) for one in PROMPTS]


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    prefix = [rng.randrange(2, VOCAB_SIZE) for _ in range(90)]
    lengths = (1, 2, 9, 33, 70, 2 * SCORED_AT_ONCE + 3)
    made = [[rng.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    return [*made, prefix[:60] + made[2], prefix + made[2]]


PROMPTS = prompts()


def jobs(top_n: int = 3, start: int = 0, max_new_tokens: int = 2) -> list[Job]:
    return [
        Job(
            one,
            SamplingParams(
                temperature=0.0,
                prompt_logprobs=top_n,
                prompt_logprobs_from=min(start, len(one) - 1),
                max_new_tokens=max_new_tokens,
            ),
        )
        for one in PROMPTS
    ]


def check(job: Job, found: list[TokenLogprob], expected: torch.Tensor) -> None:
    start = job.sampling.prompt_logprobs_from
    assert len(found) == len(job.prompt) - 1 - start
    for at, one in enumerate(found, start):
        want, token = expected[at], job.prompt[at + 1]
        assert one.logprob == pytest.approx(want[token].item(), abs=TOLERANCE)
        top = want.topk(job.sampling.prompt_logprobs or 0)
        assert one.top_logprobs == pytest.approx(top.values.tolist(), abs=TOLERANCE)
        assert len(set(one.top_tokens)) == len(one.top_tokens)
        for other, value in zip(one.top_tokens, one.top_logprobs, strict=True):
            assert want[other].item() == pytest.approx(value, abs=TOLERANCE)
        # Rank among what is clearly more or less likely.
        least = 1 + int((want > want[token] + TOLERANCE).sum())
        assert least <= one.rank <= 1 + int((want > want[token] - TOLERANCE).sum())


def run_and_check(harness: Harness, asked: list[Job], expected: list[torch.Tensor]) -> list[Result]:
    results = harness.run(asked)
    harness.check_nothing_left()
    for job, result, want in zip(asked, results, expected, strict=True):
        check(job, result.prompt_logprobs, want)
    return results


@pytest.mark.parametrize(("chunk", "num_ranks"), [(7, 1), (16, 1), (512, 1), (16, 2)])
def test_they_are_transformers_however_prompts_are_cut(
    target: Path, expected: list[torch.Tensor], chunk: int, num_ranks: int
) -> None:
    flags = {"chunked_prefill_size": chunk, "tensor_parallel_size": num_ranks}
    with running_engine(target, **flags, **SMALL) as harness:
        run_and_check(harness, jobs(), expected)
        for job, want in zip(jobs(top_n=0, start=5), expected, strict=True):
            run_and_check(harness, [job], [want])


def test_what_is_cached_is_computed_again_from_where_it_is_asked_for(
    target: Path, expected: list[torch.Tensor]
) -> None:
    with running_engine(target, chunked_prefill_size=32, **SMALL) as harness:
        plain = [
            dataclasses.replace(job, sampling=SamplingParams(temperature=0.0, max_new_tokens=2))
            for job in jobs()
        ]
        texts = [result.tokens for result in harness.run(plain)]
        for start in (0, 20, 64):
            results = run_and_check(harness, jobs(start=start), expected)
            for text, job, result in zip(texts, jobs(start=start), results, strict=True):
                assert result.tokens == text
                known = job.sampling.prompt_logprobs_from if len(job.prompt) > start + 1 else None
                if known is not None:
                    assert result.finish is not None
                    assert result.finish.cached_tokens == known // 8 * 8
        again = harness.run(plain)
        assert [result.tokens for result in again] == texts
        assert all(result.finish.cached_tokens == (len(job.prompt) - 1) // 8 * 8 for job, result in zip(plain, again, strict=True))  # fmt: skip  # noqa: E501
        assert not any(result.prompt_logprobs for result in again)


def test_speculation_and_preemption_change_nothing(
    target: Path, expected: list[torch.Tensor]
) -> None:
    # So few pages that sequences lose theirs while they run.
    flags = {**SMALL, "max_total_tokens": 8 * 36, "speculative_num_draft_tokens": 6}
    with running_engine(target, "NGRAM", chunked_prefill_size=7, **flags) as harness:
        harness.engine.draft_everything()
        asked = [
            dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, ignore_eos=True))
            for job in jobs(top_n=1, max_new_tokens=140)
        ]
        together = run_and_check(harness, asked, expected)
        assert sum(result.finish.preemptions for result in together if result.finish) > 0
        for job, result, want in zip(asked, together, expected, strict=True):
            assert run_and_check(harness, [job], [want])[0].tokens == result.tokens


@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM", "STANDALONE"])
def test_a_prompt_may_fill_the_context(
    algorithm: str, target: Path, expected: list[torch.Tensor]
) -> None:
    """One token is chosen behind it, which is never computed."""
    number = next(i for i, one in enumerate(PROMPTS) if len(one) == 70)
    draft = {"speculative_draft_model_path": str(target)} if algorithm == "STANDALONE" else {}
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2, max_new_tokens=1)
    flags = {"page_size": 10, "max_total_tokens": 70, "context_length": 70}
    with running_engine(target, algorithm, chunked_prefill_size=16, **flags, **draft) as harness:
        job = Job(PROMPTS[number], sampling)
        for _ in range(2):
            run_and_check(harness, [job], [expected[number]])
        with pytest.raises(PromptTooLong):
            harness.run([Job([*job.prompt, 5], sampling)])


def test_what_is_not_in_the_prompt_is_refused(target: Path) -> None:
    with running_engine(target, **SMALL) as harness:
        for asked, field in (
            ({"prompt_logprobs": 0, "prompt_logprobs_from": 3}, "prompt_logprobs_from"),
            ({"prompt_logprobs": 21}, "prompt_logprobs"),
            ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                harness.run([Job([1, 2, 3], SamplingParams(**asked))])
            assert refused.value.field == field
