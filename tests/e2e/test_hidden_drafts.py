"""The bundled heads as processes: hidden states through the arena, prefix hits, restarts and kills.

FOREDRAFT_TEST_KILLS sets how often a draft is killed; a release is tested with 200.
"""

import os
import random
import threading
import time
from pathlib import Path

import pytest

from foredraft.telemetry.metrics import value
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing.engines import Harness, Job, accept_length, running_engine
from testing.stack import eventually

NUM_KILLS = int(os.environ.get("FOREDRAFT_TEST_KILLS", "4"))
MODELS = Path(__file__).parents[2] / "models"
TARGET = MODELS / "foredraft-demo"
HEADS = {"EAGLE": MODELS / "foredraft-demo-eagle", "EAGLE3": MODELS / "foredraft-demo-eagle3"}
FLAGS = {"page_size": 16, "chunked_prefill_size": 64, "max_running_requests": 6}
TREE = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 6,
    "draft_step_timeout": 20.0,
}
STORY = (
    "Once upon a time there was a little girl named Lily. She lived with her mother and her father"
    " in a small house at the edge of a big forest. Every morning she put on her red shoes and went"
    " to the garden to feed the birds. One day a blue bird with a hurt wing sat on the fence and"
    " did not eat. "
)
NEW = 40
ENDINGS = (
    "Lily was sad and",
    "The bird looked at Lily and said,",
    "Her mother came out of the house. She",
    "Then it began to rain, and",
    "Lily ran to her father and asked him",
    "The next day",
)


def jobs() -> list[Job]:
    """A long prefix in common, greedy and seeded in turn."""
    tokenizer = Tokenizer.from_dir(TARGET)
    return [
        Job(
            tokenizer.encode(STORY + ending),
            SamplingParams(temperature=0.8 * (i % 2), max_new_tokens=NEW, ignore_eos=True, seed=i),
        )
        for i, ending in enumerate(ENDINGS)
    ]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Returns the texts of plain decoding."""
    with running_engine(TARGET, **FLAGS) as harness:
        return [result.tokens for result in harness.run(jobs())]


@pytest.mark.parametrize("algorithm", list(HEADS))
def test_prefix_hits_and_restarts_cost_no_acceptance(
    algorithm: str, plain: list[list[int]]
) -> None:
    work = jobs()
    flags = {**FLAGS, **TREE, "speculative_draft_model_path": str(HEADS[algorithm])}

    def measure(harness: Harness) -> tuple[float, int]:
        results = harness.run(work)
        assert [result.tokens for result in results] == plain
        return accept_length(results), sum(result.finish.cached_tokens for result in results)

    with running_engine(TARGET, algorithm, disable_radix_cache=True, **flags) as harness:
        without, num_cached = measure(harness)
        assert num_cached == 0
    assert without > 1.5
    with running_engine(TARGET, algorithm, **flags) as harness:
        assert value("foredraft_draft_transport_info", transport="shm") == 1
        cold, _ = measure(harness)
        warm, num_cached = measure(harness)
        assert num_cached > 64 * len(work)
        harness.draft.kill()
        time.sleep(0.1)
        harness.draft.start()
        harness.wait_for_draft()
        measure(harness)
        healed, num_cached_again = measure(harness)
        assert num_cached_again == num_cached
        harness.check_nothing_left()
    print(
        f"{algorithm}: {without:.3f} without cache, {cold:.3f} {warm:.3f} with, {healed:.3f} healed"
    )
    assert cold == pytest.approx(without, rel=0.02)
    assert warm == pytest.approx(without, rel=0.02)
    assert healed == pytest.approx(warm, rel=0.05)


class Load:
    """Runs jobs over and over in a thread and keeps every output."""

    def __init__(self, harness: Harness, work: list[Job]) -> None:
        self.outputs: list[list[list[int]]] = []
        self.num_accepted = 0
        self._harness, self._work = harness, work
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(300)

    def _run(self) -> None:
        while not self._stop.is_set():
            results = self._harness.run(self._work)
            self.outputs.append([result.tokens for result in results])
            self.num_accepted += sum(result.finish.accepted_tokens for result in results)


def num_segments() -> int:
    return len(list(Path("/dev/shm").glob(f"foredraft-{os.getpid()}-*")))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_mapped() -> int:
    """Segments that this process, the verifier, has mapped."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/foredraft-")


@pytest.mark.timeout(600 + 30 * NUM_KILLS)
def test_kills_change_nothing_and_leave_nothing(plain: list[list[int]]) -> None:
    flags = {**FLAGS, **TREE, "speculative_draft_model_path": str(HEADS["EAGLE3"])}
    rng = random.Random(1)
    with running_engine(TARGET, "EAGLE3", **flags) as harness:
        with Load(harness, jobs()) as load:
            descriptors = num_descriptors()
            for _ in range(NUM_KILLS):
                time.sleep(rng.random() * 0.5)
                harness.draft.kill()
                harness.draft.start()
                harness.wait_for_draft()
                assert num_mapped() <= 1
                # gRPC closes the sockets of a lost draft a moment later.
                eventually(lambda: num_descriptors() <= descriptors + 4)
            eventually(lambda: load.num_accepted > 0)
        # The engine takes a draft up at the first step after its attach.
        assert [result.tokens for result in harness.run(jobs())] == plain
        harness.check_nothing_left()
        assert harness.engine._drafts.each[0]._hidden._runs == {}
    assert load.outputs
    assert all(outputs == plain for outputs in load.outputs)
    assert num_segments() == num_mapped() == 0
