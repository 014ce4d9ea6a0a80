"""Speculation changes no token: greedy and seeded output against transformers and the rule in
float64.
"""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from foredraft.telemetry.metrics import value
from foredraft.types import SamplingParams
from testing.checkpoints import ARCHITECTURES, EOS, VOCAB_SIZE, make_checkpoint
from testing.engines import Harness, Job, Result, running_engine
from testing.reference import Reference
from testing.rounds import rounds

NUM_PROMPTS = rounds(80, 200)
NUM_TOKENS = 16
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


@dataclass(slots=True)
class Case:
    """A target of one architecture: what transformers says of it, and engines on it, by
    algorithm.
    """

    name: str
    reference: Reference
    engines: dict[str, Harness]


# The last: two ranks share the model.
CASES = [*((name, 1) for name in ARCHITECTURES), ("LlamaForCausalLM", 2)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-tp{case[1]}")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    name, size = request.param
    directory = tmp_path_factory.mktemp(name)
    target = make_checkpoint(directory / "target", name)
    # A draft that is sometimes right: the target with its weights disturbed a little.
    draft = make_checkpoint(directory / "draft", name, noise=0.05)
    engines: dict[str, Harness] = {}
    failures, attaches = _of_drafts("failures"), _of_drafts("attaches")
    with contextlib.ExitStack() as stack:
        for algorithm, flags in TREES.items():
            path = {"speculative_draft_model_path": str(draft)} if "STAND" in algorithm else {}
            flags = {**PRESSURE, **flags, **path, "tensor_parallel_size": size}
            engine = running_engine(target, algorithm, **flags)
            engines[algorithm] = stack.enter_context(engine)
        yield Case(name, Reference(target), engines)
    # A draft that is lost and attached again changes no token, so only the counters would show it.
    assert _of_drafts("failures") == failures
    assert _of_drafts("attaches") == [count + 1 for count in attaches]


def _of_drafts(what: str) -> list[float]:
    name = f"foredraft_draft_{what}_total"
    return [value(name, algorithm=algorithm) for algorithm in TREES if algorithm != "NONE"]


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


def run(engine: Harness, jobs: list[Job], num_at_once: int) -> list[Result]:
    """Runs jobs in groups of `num_at_once`."""
    results: list[Result] = []
    for start in range(0, len(jobs), num_at_once):
        results += engine.run(jobs[start : start + num_at_once])
    engine.check_nothing_left()
    return results


@pytest.mark.parametrize("algorithm", list(TREES))
def test_greedy_output_is_transformers(case: Case, algorithm: str) -> None:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS)
    # More output than admission keeps room for, so that pages run out.
    long = SamplingParams(temperature=0.0, max_new_tokens=9 * NUM_TOKENS, ignore_eos=True)
    jobs = [
        Job(prompt, long if i >= NUM_PROMPTS - 8 else sampling)
        for i, prompt in enumerate(prompts(7, NUM_PROMPTS))
    ]
    results: list[Result] = []
    for num_at_once, part in ((1, jobs[:8]), (3, jobs[8:32]), (8, jobs[32:])):
        results += run(case.engines[algorithm], part, num_at_once)
    cases = [
        (job.prompt, result.tokens, sampling) for job, result in zip(jobs, results, strict=True)
    ]
    ties = case.reference.check_all(cases, ENDS)
    for job, result in zip(jobs, results, strict=True):
        ended = result.tokens[-1] == EOS and not job.sampling.ignore_eos
        assert ended or len(result.tokens) == job.sampling.max_new_tokens
        assert job.sampling.ignore_eos or EOS not in result.tokens[:-1]
    for job, result in list(zip(jobs, results, strict=True))[: NUM_PROMPTS - 40 : 10]:
        expected = case.reference.generate(job.prompt, job.sampling.max_new_tokens)
        assert result.tokens == expected or ties
    num_preempted = sum(result.finish.preemptions for result in results)
    assert num_preempted > 0
    assert ties <= 3, f"{ties} ties in {NUM_PROMPTS} prompts are too many to be rounding"
    drafted = sum(result.finish.drafted_tokens for result in results)
    accepted = sum(result.finish.accepted_tokens for result in results)
    assert (drafted > 0) == (algorithm != "NONE")
    assert (accepted > 0) == (algorithm != "NONE")
    print(
        f"{case.name} {algorithm}: {ties} ties, {num_preempted} preemptions, {accepted}/{drafted}"
        " accepted"
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
    SamplingParams(
        allowed_token_ids=tuple(range(2, VOCAB_SIZE, 3)),
        bad_words=((2,), (5, 8), (8, 5, 5)),
        max_new_tokens=NUM_TOKENS,
    ),
]


def test_bad_words_are_not_produced_with_any_draft(case: Case) -> None:
    rng = random.Random(5)
    plain = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS)
    jobs = [Job(prompt, plain) for prompt in prompts(13, 24)]
    engine = case.engines["NONE"]
    for length in (1, 2, 3):
        # Words that the model says: of what is left, the next round forbids more.
        said = [result.tokens for result in run(engine, jobs, 8)]
        jobs = [
            Job(
                job.prompt,
                replace(job.sampling, bad_words=(*job.sampling.bad_words, word)),
            )
            for job, tokens in zip(jobs, said, strict=True)
            for at in [rng.randrange(max(1, len(tokens) - length))]
            for word in [tuple(tokens[at : at + length])]
        ]
    outputs = {}
    for algorithm, engine in case.engines.items():
        outputs[algorithm] = [result.tokens for result in run(engine, jobs, 8)]
        for job, tokens in zip(jobs, outputs[algorithm], strict=True):
            text = "".join(map(chr, tokens))
            assert not any("".join(map(chr, word)) in text for word in job.sampling.bad_words)
    cases = [(j.prompt, o, j.sampling) for j, o in zip(jobs, outputs["NONE"], strict=True)]
    ties = case.reference.check_all(cases, ENDS)
    for algorithm in ("NGRAM", "STANDALONE"):
        same = sum(a == b for a, b in zip(outputs[algorithm], outputs["NONE"], strict=True))
        assert same >= len(jobs) - ties, f"{algorithm}: {same} of {len(jobs)} equal"


def test_seeded_sampling_is_the_same_with_any_draft(case: Case) -> None:
    rng = random.Random(3)
    jobs = [
        Job(prompt, replace(rng.choice(SAMPLINGS), seed=rng.getrandbits(64)))
        for prompt in prompts(11, 48)
    ]
    outputs = {}
    for algorithm, engine in case.engines.items():
        outputs[algorithm] = [result.tokens for result in run(engine, jobs, 8)]
        cases = [
            (job.prompt, tokens, job.sampling)
            for job, tokens in zip(jobs, outputs[algorithm], strict=True)
        ]
        assert case.reference.check_all(cases, ENDS) <= 2
    for algorithm in ("NGRAM", "STANDALONE"):
        same = sum(a == b for a, b in zip(outputs[algorithm], outputs["NONE"], strict=True))
        assert same >= len(jobs) - 2, f"{algorithm}: {same} of {len(jobs)} equal"
