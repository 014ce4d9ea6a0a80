"""Block drafters behind a real engine: no token changes, greedy or seeded, with kills of the draft,
under pressure on pages.
"""

from pathlib import Path

import pytest

from testing.block_drafts import tiny_block, tiny_peagle
from testing.checkpoints import make_checkpoint
from testing.draft_heads import TinyHead, save_head
from testing.engines import Job, running_engine
from testing.repeated_texts import jobs_with_prefix

# A pool so small that four sequences preempt each other, chunks far shorter than the prompts.
PRESSURE = {
    "page_size": 4,
    "max_total_tokens": 4 * 60,
    "chunked_prefill_size": 20,
    "max_running_requests": 4,
    "context_length": 200,
    "draft_step_timeout": 20.0,
}
HEADS: dict[str, TinyHead] = {
    "dflash": tiny_block("DFLASH", 1, ids=(0, 2), window=9, num_layers=3, sliding=(1,)),
    "dspark": tiny_block("DSPARK", 2, confidence="both", layout="deepspec", draft_vocab=90),
    "dspark-tree": tiny_block("DSPARK", 4, markov="rnn"),
    "peagle": tiny_peagle(3),
}
TREE = {
    "speculative_num_steps": 4,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 10,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5)


def jobs() -> list[Job]:
    return jobs_with_prefix(5, 30, 50)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    with running_engine(target, page_size=4) as harness:
        return [result.tokens for result in harness.run(jobs())]


@pytest.mark.parametrize("kind", HEADS)
def test_no_token_changes(kind: str, target: Path, plain: list[list[int]], tmp_path: Path) -> None:
    head = HEADS[kind]
    folder = save_head(head, tmp_path)
    flags = {**PRESSURE, "speculative_draft_model_path": str(folder)}
    if kind.endswith("tree"):
        flags |= TREE
    with running_engine(target, head.algorithm, **flags) as harness:
        first, killed, healed = harness.run_around_a_kill(jobs())
        harness.check_nothing_left()
    for results in (first, killed, healed):
        expected = plain * (len(results) // len(plain))
        assert [result.tokens for result in results] == expected
    for results in (first, healed):
        assert sum(result.finish.drafted_tokens for result in results) > 100
    assert sum(result.finish.cached_tokens for result in healed) > 0
