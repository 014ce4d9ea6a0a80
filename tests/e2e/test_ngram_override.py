"""N-grams over a model's draft behind a real engine: no token changes, greedy or seeded, with kills
of the draft, under pressure on pages; and text that repeats is accepted in a model's place.
"""

from pathlib import Path

import pytest

from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.draft_heads import save_head
from testing.engines import Job, accept_length, running_engine
from testing.repeated_texts import HEADS, repeated_jobs

MODELS = Path(__file__).parents[2] / "models"
TARGET = MODELS / "foredraft-demo"
# A pool so small that four sequences preempt each other, chunks far shorter than the prompts.
PRESSURE = {
    "page_size": 4,
    "max_total_tokens": 4 * 60,
    "chunked_prefill_size": 20,
    "max_running_requests": 4,
    "context_length": 200,
    "draft_step_timeout": 20.0,
    "speculative_num_steps": 4,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 8,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    with running_engine(target, page_size=4) as harness:
        return [result.tokens for result in harness.run(repeated_jobs(5))]


@pytest.mark.parametrize("kind", [*HEADS, "standalone"])
def test_no_token_changes(kind: str, target: Path, plain: list[list[int]], tmp_path: Path) -> None:
    algorithm = "STANDALONE"
    if kind == "standalone":
        make_checkpoint(tmp_path, seed=9)
    else:
        algorithm = HEADS[kind].algorithm
        save_head(HEADS[kind], tmp_path)
    flags = {
        **PRESSURE,
        "speculative_draft_model_path": str(tmp_path),
        "speculative_ngram_override": True,
        "speculative_ngram_override_min_match": 1,  # random text repeats no more than that
    }
    with running_engine(target, algorithm, **flags) as harness:
        first, killed, healed = harness.run_around_a_kill(repeated_jobs(5))
        harness.check_nothing_left()
    for results in (first, killed, healed):
        expected = plain * (len(results) // len(plain))
        assert [result.tokens for result in results] == expected
    for results in (first, healed):
        assert sum(result.finish.drafted_tokens for result in results) > 100


def test_text_that_repeats_is_accepted_in_the_heads_place() -> None:
    """A table whose rows the bundled model copies: n-grams know it better than the head does."""
    rows = "".join(f"| {name} | 4.23 | 3.69 | 4.52 |\n" for name in ("alpha", "omega", "delta"))
    prompt = Tokenizer.from_dir(TARGET).encode(rows * 3)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=48, ignore_eos=True)
    flags = {
        "speculative_num_steps": 5,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 6,
        "speculative_draft_model_path": str(MODELS / "foredraft-demo-eagle3"),
        "draft_step_timeout": 20.0,
    }
    results = {}
    for is_over in (False, True):
        with running_engine(
            TARGET, "EAGLE3", page_size=8, speculative_ngram_override=is_over, **flags
        ) as harness:
            results[is_over] = harness.run([Job(prompt, sampling)])
    alone, over = results[False], results[True]
    assert [result.tokens for result in over] == [result.tokens for result in alone]
    print(f"{accept_length(alone):.2f} by the head, {accept_length(over):.2f} with n-grams over it")
    assert accept_length(over) > accept_length(alone)
    assert accept_length(over) > 4
