"""The measurement of a draft while the engine idles: what it says, and that no client notices."""

from pathlib import Path

import pytest

from foredraft.telemetry.metrics import value
from foredraft.types import FinishReason, SamplingParams
from testing.checkpoints import make_checkpoint
from testing.engines import Harness, Job, running_engine
from testing.hidden_drafts import HiddenDrafter, engine_with
from testing.stack import eventually
from testing.tiny_tokenizers import byte_level, save
from verify_service.engine.self_test import TEXTS, SelfTest, built_in_prompts
from verify_service.outputs import Finish, Load, StepOutput

COUNTERS = (
    "foredraft_generation_tokens_total",
    "foredraft_prompt_tokens_total",
    "foredraft_queue_seconds_count",
)


def standalone(target: Path, draft: Path) -> dict:
    return {
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": 3,
        "skip_draft_self_test": False,
        "page_size": 8,
    }


def test_the_targets_own_weights_are_always_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = make_checkpoint(tmp_path / "model")
    before = [value(name) for name in COUNTERS]
    requests = value("foredraft_verifier_requests_total", outcome="length")
    with running_engine(path, "STANDALONE", **standalone(path, path)) as harness:
        eventually(lambda: "self-test: accept length" in caplog.text)
        eventually(lambda: harness.engine.is_idle)
        harness.check_nothing_left()
    name = "foredraft_draft_self_test_accept_length_tokens"
    assert value(name, algorithm="STANDALONE") > 3.0
    assert "almost never right" not in caplog.text
    assert [value(name) for name in COUNTERS] == before
    assert value("foredraft_verifier_requests_total", outcome="length") == requests


def test_a_draft_of_another_model_is_told_from_a_bad_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path / "model")
    other = make_checkpoint(tmp_path / "other", seed=1)
    with running_engine(path, "STANDALONE", **standalone(path, other)):
        eventually(lambda: "almost never right. Check" in caplog.text)


def test_a_draft_that_proposes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path / "model")
    drafter = HiddenDrafter(48, weight_bytes=1)
    with engine_with(drafter, path, skip_draft_self_test=False):
        eventually(lambda: "proposed nothing" in caplog.text)


def test_clients_come_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = make_checkpoint(tmp_path / "model")
    sampling = SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True)

    def is_probing(harness: Harness) -> bool:
        """It may be over before this process looks."""
        return not harness.engine.is_idle or "self-test: accept length" in caplog.text

    with running_engine(
        path, "STANDALONE", max_running_requests=4, **standalone(path, path)
    ) as harness:
        eventually(lambda: is_probing(harness))
        # All slots are the test's; it gives them up at once.
        result = harness.run([Job([5, 6, 7], sampling)])[0]
        assert len(result.tokens) == 5
        eventually(lambda: "self-test: accept length" in caplog.text)
        harness.run([Job([5, 6, 7], sampling)])
    assert caplog.text.count("self-test") == 1


def test_an_interrupted_test_waits_until_the_engine_has_idled() -> None:
    """Or it would begin, and be cancelled, between any two requests of a client."""
    test = SelfTest([[1, 2]], lambda _: None)
    [probe] = test.due(1, is_quiet=False)
    assert test.interrupt()
    cancelled = StepOutput(0, finish=Finish(FinishReason.CANCELLED))
    probe.sink([cancelled], Load(0, 0, 1, 1, True))
    assert not test.due(1, is_quiet=False)
    assert test.due(1, is_quiet=True)
    probe.sink([cancelled], Load(0, 0, 1, 1, True))
    assert test.due(2, is_quiet=False)  # another attach


def test_prompts_are_the_targets_tokens(tmp_path: Path) -> None:
    bare = built_in_prompts(tmp_path, 100)
    assert len(bare) == len(TEXTS)
    assert all(0 <= token < 100 for prompt in bare for token in prompt)
    tokenizer = byte_level()
    save(tokenizer, tmp_path)
    assert built_in_prompts(tmp_path, 600) == [tokenizer.encode(text).ids for text in TEXTS]
    assert built_in_prompts(tmp_path, 10) == []
