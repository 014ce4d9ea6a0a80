"""N-grams over a model's draft on a GPU: the draft then gets its tokens through the host, and no
token changes, greedy or seeded, with a kill of the draft.
"""

from pathlib import Path

import pytest

from testing.checkpoints import make_checkpoint
from testing.draft_heads import save_head
from testing.engines import running_engine
from testing.repeated_texts import HEADS, repeated_jobs
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    with running_engine(target, device="cuda", dtype="float32") as harness:
        return [result.tokens for result in harness.run(repeated_jobs(6))]


@pytest.mark.parametrize("kind", HEADS)
def test_no_token_changes(kind: str, target: Path, plain: list[list[int]], tmp_path: Path) -> None:
    head = HEADS[kind]
    flags = {
        "speculative_draft_model_path": str(save_head(head, tmp_path)),
        "speculative_num_steps": 4,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 8,
        "speculative_ngram_override": True,
        "speculative_ngram_override_min_match": 1,  # random text repeats no more than that
        "device": "cuda",
        "dtype": "float32",
        "draft_step_timeout": 60.0,
    }
    with running_engine(target, head.algorithm, **flags) as harness:
        first, killed, healed = harness.run_around_a_kill(repeated_jobs(6))
        harness.check_nothing_left()
    for results in (first, killed, healed):
        expected = plain * (len(results) // len(plain))
        assert [result.tokens for result in results] == expected
    for results in (first, healed):
        assert sum(result.finish.drafted_tokens for result in results if result.finish) > 100
