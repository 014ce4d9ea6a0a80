"""A draft that goes wrong while it attaches, or with a step half done: no token differs.

On a GPU: `test_gpu_faults`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from foredraft.models.registry import resolve_model_path
from foredraft.types import SamplingParams
from testing import engines
from testing.drafts import ForkedDraft
from testing.engines import Harness, Job, running_engine
from testing.fault_cases import BlockCount, FaultyDraft, do_fault
from testing.faulty_draft import FaultFile, Faults

BLOCKS = BlockCount()  # there are none without a GPU
WORK = [
    Job(
        [40 + i, 7, 19, 200, 31],
        SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=24, ignore_eos=True),
    )
    for i in range(3)
]


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model_path("foredraft-demo")


@pytest.fixture(scope="module")
def expected(demo: Path) -> list[list[int]]:
    with running_engine(demo, "NONE") as plain:
        return [result.tokens for result in plain.run(WORK)]


@pytest.fixture(scope="module")
def harness(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    head = str(resolve_model_path("foredraft-demo-eagle3"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT_FILE", str(tmp_path_factory.mktemp("fault") / "fault"))
        patch.setattr(FaultyDraft, "num_spares", 1)
        patch.setattr(FaultyDraft, "process", ForkedDraft)
        patch.setattr(engines, "new_draft", FaultyDraft)
        with running_engine(
            demo, "EAGLE3", speculative_draft_model_path=head, draft_step_timeout=20.0
        ) as made:
            yield made


def test_a_fault_happens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the thread that looks for faults comes between."""
    monkeypatch.setattr(Faults, "_watch", lambda faults: None)
    file = FaultFile(tmp_path / "fault", 1)
    file.path.write_text("read:FAULT")
    faults = Faults(file.path)

    def unlink(path: Path, **options: bool) -> None:
        if not faults._point:
            faults._look()
        os.unlink(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    faults.arrive("read")
    assert file.has_happened
    assert not faults.is_meant("read")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "action"),
    [("mapped", "SIGKILL"), ("answering", "SIGSTOP"), ("value computed", "SIGKILL")],
)
def test_no_token_differs(
    point: str, action: str, harness: Harness, expected: list[list[int]]
) -> None:
    found = do_fault(harness, point, action, WORK, expected, BLOCKS)
    assert found.happened
    assert found.equal
