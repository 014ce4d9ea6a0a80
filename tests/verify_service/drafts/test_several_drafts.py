"""Two drafts behind one engine, as real processes: no token changes, whichever drafts and whichever
dies.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from foredraft.telemetry.metrics import render
from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.drafts import DraftProcess
from testing.engines import Collector, Harness, Job, running_engine
from testing.stack import eventually
from verify_service.controller.messages import Candidate
from verify_service.outputs import Load, StepOutput

CHAIN = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "draft_step_timeout": 5.0,
}
NUM_NEW = 100


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("several")
    for name, noise in (("target", 0.0), ("draft", 0.02)):
        make_checkpoint(directory / name, noise=noise)
    return directory


def jobs() -> list[Job]:
    prompts = [[5, 6, 7, 8] * 6, list(range(20, 44)), [9, 8, 7, 6]]
    return [
        Job(
            prompt,
            SamplingParams(temperature=t, seed=i, max_new_tokens=NUM_NEW, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
        for t in (0.0, 0.8)
    ]


@pytest.fixture(scope="module")
def texts(models: Path) -> Iterator[list[list[int]]]:
    """Returns the texts of plain decoding for long jobs."""
    with running_engine(models / "target") as harness:
        yield [result.tokens for result in harness.run(jobs())]


@pytest.fixture(scope="module")
def harness(models: Path) -> Iterator[Harness]:
    flags = {**CHAIN, "speculative_draft_model_path": str(models / "draft")}
    with running_engine(models / "target", "STANDALONE,NGRAM", **flags) as running:
        yield running


def count(name: str, algorithm: str) -> float:
    lines = [line for line in render().decode().splitlines() if line.startswith(name)]
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if f'algorithm="{algorithm}"' in line
    )


def prefer(harness: Harness, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one draft better than any measurement could say."""

    def values(candidates: Sequence[Candidate], plain: float) -> np.ndarray:
        return np.ones((2, len(candidates))) + (np.arange(2) == number)[:, None]

    monkeypatch.setattr(harness.engine._sizes.controller._goodput, "of_drafts", values)


class Interrupted(Collector):
    """Calls `happens` between two steps, once every request has begun to answer."""

    def __init__(self, harness: Harness, num_requests: int, happens: Callable[[], None]) -> None:
        super().__init__(harness.engine, num_requests)
        self._happens: Callable[[], None] | None = happens

    def _take(self, outputs: list[StepOutput], load: Load) -> None:
        super()._take(outputs, load)
        if self._happens is not None and all(result.tokens for result in self.results):
            assert not any(result.finish for result in self.results)
            self._happens()
            self._happens = None


def run_meanwhile(
    harness: Harness, what: list[Job], happens: Callable[[], None]
) -> list[list[int]]:
    """Runs jobs; `happens` is called once every one of them has begun to answer."""
    results = Interrupted(harness, len(what), happens).run(what, 120)
    return [result.tokens for result in results]


def test_no_token_changes_and_both_are_asked(harness: Harness, texts: list[list[int]]) -> None:
    drafts, acceptance = harness.engine._drafts, harness.engine._sizes.controller._acceptance
    most = [0.0, 0.0]  # outcomes of each

    def have_both_been_asked() -> bool:
        """After another run: the costs of this machine decide which one is asked, and when."""
        assert [result.tokens for result in harness.run(jobs())] == texts
        assert drafts.assigned == {}
        for number, one in enumerate(acceptance):
            most[number] = max(most[number], one.num_outcomes)
        return min(most) > 5

    eventually(have_both_been_asked)
    harness.check_nothing_left()


@pytest.mark.parametrize("number", [0, 1])
def test_the_chosen_one_drafts_and_is_named(
    harness: Harness, texts: list[list[int]], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(harness, number, monkeypatch)
    names = harness.engine._drafts.names
    before = [count("foredraft_drafts_total", name) for name in names]
    results = harness.run(jobs())
    assert [result.tokens for result in results] == texts
    after = [count("foredraft_drafts_total", name) for name in names]
    assert after[number] > before[number]
    assert after[1 - number] == before[1 - number]


@pytest.mark.parametrize("name", ["STANDALONE", "NGRAM"])
def test_a_draft_that_is_killed_leaves_its_sequences_to_the_other(
    harness: Harness, texts: list[list[int]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = harness.engine._drafts
    number = drafts.names.index(name)
    prefer(harness, number, monkeypatch)
    before = count("foredraft_drafts_total", drafts.names[1 - number])
    got = run_meanwhile(harness, jobs(), harness.drafts[name].kill)
    assert got == texts
    eventually(lambda: not harness.engine.load().draft_available)
    assert count("foredraft_drafts_total", drafts.names[1 - number]) > before
    harness.drafts[name].start()
    harness.wait_for_draft()
    before = count("foredraft_drafts_total", name)
    assert [result.tokens for result in harness.run(jobs())] == texts
    assert count("foredraft_drafts_total", name) > before
    harness.check_nothing_left()


def test_a_draft_that_hangs_while_it_is_tried_costs_one_timeout(
    harness: Harness, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(harness, 0, monkeypatch)
    got = run_meanwhile(harness, jobs(), harness.drafts["NGRAM"].pause)
    assert got == texts
    harness.drafts["NGRAM"].resume()
    harness.wait_for_draft()


def test_one_that_is_not_there_or_another_is_done_without(
    models: Path, texts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    flags = {
        **CHAIN,
        "speculative_draft_model_path": str(models / "draft"),
        "draft_wait": 0.2,
    }
    later = DraftProcess("--device=cpu", "--speculative-algorithm=NGRAM")
    with DraftProcess("--device=cpu") as ngram:
        flags["draft"] = (f"standalone={later.target}", f"NGRAM={ngram.target}")
        with running_engine(models / "target", "STANDALONE,NGRAM", wait=False, **flags) as harness:
            standalone, other = harness.engine._drafts.each
            eventually(lambda: other.epoch)
            results = harness.run(jobs())
            assert [result.tokens for result in results] == texts
            assert sum(result.finish.accepted_tokens for result in results) > 0
            assert not standalone.epoch
            assert not harness.engine.load().draft_available
            with later:
                refusal = f"{later.target} is a draft for NGRAM, not STANDALONE"
                eventually(lambda: refusal in caplog.text)
                assert [result.tokens for result in harness.run(jobs())] == texts
                assert not standalone.epoch
                later.kill()
                later.flags = (
                    "--device=cpu",
                    "--speculative-algorithm=STANDALONE",
                    f"--speculative-draft-model-path={models / 'draft'}",
                    f"--model-path={models / 'target'}",
                    "--num-threads=1",
                    "--speculative-num-steps=3",
                )
                later.start()
                harness.wait_for_draft()
                assert [result.tokens for result in harness.run(jobs())] == texts
            harness.check_nothing_left()
