"""Speculation changes no token: greedy and seeded output against transformers and the rule in float64."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.telemetry.metrics import value
from foredraft.types import SamplingParams
from tests.support.checkpoints import ARCHITECTURES, EOS, VOCAB_SIZE, make_checkpoint
from tests.support.engines import Job, Result, running_engine
from tests.support.reference import Reference

NUM_PROMPTS = 200
NUM_TOKENS = 24
ENDS = frozenset({EOS})

# A pool so small that eight sequences preempt each other, chunks far shorter than the prompts.
PRESSURE = {
    "page_size": 8,
    "max_total_tokens": 8 * 32,
    "chunked_prefill_size": 20,
    "max_running_requests": 8,
    "draft_step_timeout": 20.0,  # on a loaded machine too
}
TREES = {
    "NONE": {},
    "NGRAM": {"speculative_num_draft_tokens": 8},
    "STANDALONE": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 7,
    },
}


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Reference]:
    directory = tmp_path_factory.mktemp(request.param)
    path = make_checkpoint(directory / "target", request.param)
    # A draft that is sometimes right: the target with its weights disturbed a little.
    make_checkpoint(directory / "draft", request.param, noise=0.05)
    return request.param, directory, Reference(path)


def prompts(seed: int, count: int) -> list[list[int]]:
    """Random prompts of 1 to 60 tokens, in families that share prefixes, with parts that repeat."""
    rng = random.Random(seed)
    families = [[rng.randrange(2, VOCAB_SIZE) for _ in range(40)] for _ in range(6)]
    made = []
    for _ in range(count):
        prefix = rng.choice(families)[: rng.randrange(0, 41)]
        tail = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
        made.append(prefix + tail * rng.choice([1, 1, 2]))
    return made


def run(
    directory: Path, algorithm: str, jobs: list[Job], num_at_once: int
) -> tuple[list[Result], int]:
    """Runs jobs in groups of `num_at_once` and returns the results and the number of preemptions."""
    flags = {**PRESSURE, **TREES[algorithm]}
    if algorithm == "STANDALONE":
        flags["speculative_draft_model_path"] = str(directory / "draft")
    results: list[Result] = []
    failures = value("foredraft_draft_failures_total", algorithm=algorithm)
    attaches = value("foredraft_draft_attaches_total", algorithm=algorithm)
    with running_engine(directory / "target", algorithm, **flags) as harness:
        for start in range(0, len(jobs), num_at_once):
            results += harness.run(jobs[start : start + num_at_once])
        harness.check_nothing_left()
    # A draft that is lost and attached again changes no token, so only the counters would show it.
    assert value("foredraft_draft_failures_total", algorithm=algorithm) == failures
    expected = attaches + (algorithm != "NONE")
    assert value("foredraft_draft_attaches_total", algorithm=algorithm) == expected
    return results, sum(result.finish.preemptions for result in results)


@pytest.mark.parametrize("algorithm", list(TREES))
def test_greedy_output_is_transformers(
    checkpoint: tuple[str, Path, Reference], algorithm: str
) -> None:
    name, directory, reference = checkpoint
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS)
    # More output than admission keeps room for, so that pages run out.
    long = SamplingParams(temperature=0.0, max_new_tokens=6 * NUM_TOKENS, ignore_eos=True)
    jobs = [
        Job(prompt, long if i >= NUM_PROMPTS - 16 else sampling)
        for i, prompt in enumerate(prompts(7, NUM_PROMPTS))
    ]
    results: list[Result] = []
    num_preempted = 0
    for num_at_once, part in ((1, jobs[:8]), (3, jobs[8:32]), (8, jobs[32:])):
        some, preemptions = run(directory, algorithm, part, num_at_once)
        results += some
        num_preempted += preemptions
    ties = 0
    for job, result in zip(jobs, results, strict=True):
        ties += reference.check(job.prompt, result.tokens, sampling, ENDS)
        ended = result.tokens[-1] == EOS and not job.sampling.ignore_eos
        assert ended or len(result.tokens) == job.sampling.max_new_tokens
        assert job.sampling.ignore_eos or EOS not in result.tokens[:-1]
    for job, result in list(zip(jobs, results, strict=True))[:160:40]:
        expected = reference.generate(job.prompt, job.sampling.max_new_tokens)
        assert result.tokens == expected or ties
    assert num_preempted > 0
    assert ties <= 3, f"{ties} ties in {NUM_PROMPTS} prompts are too many to be rounding"
    drafted = sum(result.finish.drafted_tokens for result in results)
    accepted = sum(result.finish.accepted_tokens for result in results)
    assert (drafted > 0) == (algorithm != "NONE")
    assert (accepted > 0) == (algorithm != "NONE")
    print(
        f"{name} {algorithm}: {ties} ties, {num_preempted} preemptions, {accepted}/{drafted} accepted"
    )


SAMPLINGS = [
    SamplingParams(temperature=0.6, top_p=0.9, max_new_tokens=NUM_TOKENS),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.02, max_new_tokens=NUM_TOKENS),
    SamplingParams(
        temperature=1.0,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        logit_bias={5: 1.5, 9: -100.0},
        min_new_tokens=10,
        max_new_tokens=NUM_TOKENS,
    ),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, max_new_tokens=NUM_TOKENS),
]


def test_seeded_sampling_is_the_same_with_any_draft(
    checkpoint: tuple[str, Path, Reference],
) -> None:
    _, directory, reference = checkpoint
    rng = random.Random(3)
    jobs = [
        Job(prompt, _with_seed(rng.choice(SAMPLINGS), rng.getrandbits(64)))
        for prompt in prompts(11, 48)
    ]
    outputs = {}
    for algorithm in TREES:
        results, _ = run(directory, algorithm, jobs, 8)
        ties = sum(
            reference.check(job.prompt, result.tokens, job.sampling, ENDS)
            for job, result in zip(jobs, results, strict=True)
        )
        outputs[algorithm] = [result.tokens for result in results]
        assert ties <= 2
    for algorithm in ("NGRAM", "STANDALONE"):
        same = sum(a == b for a, b in zip(outputs[algorithm], outputs["NONE"], strict=True))
        assert same >= len(jobs) - 2, f"{algorithm}: {same} of {len(jobs)} equal"


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return replace(params, seed=seed)
