"""Texts of the bundled family with and without drafts, compared up to ties."""

from pathlib import Path

from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.engines import Job, running_engine
from testing.ties import first_difference, gap_between

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
    """Returns jobs whose tokens need no host, some with filters; they end `spread` tokens one
    after the other.
    """
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
    """Returns flags for a bundled draft and trees of this many steps, topk and tokens."""
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
    """Asserts that texts are equal, up to one place where two tokens are within rounding of
    each other.
    """
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
