"""A short run of the chaos suite on the real stack, and the suite's own judgement on made-up
results.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from testing.chaos.cases import Case, Result
from testing.chaos.faults import BY_NAME, FAULTS, plan
from testing.chaos.link import garble
from testing.chaos.room import Room
from testing.chaos.trial import assess

ROOT = Path(__file__).resolve().parents[2]
# The most different ones; the long run has all.
SHORT = (
    "draft killed",
    "draft lies",
    "link garbled",
    "gateway SIGTERM",
    "verifier killed",
    "disk full, draft killed",
)
CASE = Case("prompt", 4, 0.0, 7, (1, 2, 3, 4))


@pytest.mark.slow
def test_a_short_run_loses_nothing_that_it_must_not(tmp_path: Path) -> None:
    output, log = tmp_path / "chaos.json", tmp_path / "chaos.log"
    command = [sys.executable, "-m", "benchmarks.chaos", "--quiet", "--seed", "2"]
    command += ["--faults", str(len(SHORT)), "--only", *SHORT, "--algorithms", "NGRAM"]
    command += ["--clients", "3", "--deadline", "60", "--output", str(output), "--log", str(log)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    print(run.stdout, run.stderr, log.read_text() if log.exists() else "", sep="\n")
    assert run.returncode == 0
    # Only what fills a file system may be left out, and only where there is no room for it.
    has_room = "left out" not in run.stderr
    expected = {name for name in SHORT if has_room or not BY_NAME[name].needs_room}
    assert len(expected) >= 5
    reports = json.loads(output.read_text())["faults"]
    assert sorted(report["fault"] for report in reports) == sorted(expected)
    for report in reports:
        assert report["recovered"] is not None
        # Under load when it struck, and most of it answered.
        assert report["outcomes"]["right"] > 0
        assert [report[name] for name in ("wrong", "leaks", "complaint")] == [[], [], ""]


def test_a_plan_is_the_seeds_and_has_every_fault() -> None:
    faults = plan(None, 500, 1)
    assert faults == plan(None, 500, 1) != plan(None, 500, 2)
    assert set(faults) == set(FAULTS)
    assert plan(None, 100, 1) == faults[:100]
    assert {fault.name for fault in plan(SHORT, len(SHORT), 1)} == set(SHORT)


@pytest.mark.parametrize(
    ("fault", "result", "complaint"),
    [
        ("link cut", {"outcome": "right", "tokens": [1, 2, 3, 4]}, ""),
        ("link cut", {"outcome": "wrong", "tokens": [1, 2, 9, 4]}, "tokens differ"),
        ("link cut", {"outcome": "unavailable", "is_retryable": True}, "unavailable"),
        ("verifier killed", {"outcome": "unavailable", "is_retryable": True, "num_seen": 2}, ""),
        ("verifier killed", {"outcome": "unavailable", "num_seen": 2}, "not said to be retryable"),
        ("verifier killed", {"outcome": "unavailable", "is_retryable": True}, "began before"),
        ("verifier killed", {"outcome": "internal", "num_seen": 2}, "internal"),
        ("verifier killed", {"outcome": "late", "num_seen": 2}, "late"),
        # What came of an answer before it broke off must be right too.
        ("gateway killed", {"outcome": "broken", "tokens": [1, 9], "num_seen": 2}, "tokens differ"),
        ("gateway killed", {"outcome": "broken", "tokens": [1, 2], "num_seen": 2}, ""),
    ],
)
def test_results_are_judged(fault: str, result: dict[str, object], complaint: str) -> None:
    one = Result("grpc", CASE, started=10.0, ended=12.0, **result)  # type: ignore[arg-type]
    lost, wrong = assess(BY_NAME[fault], [one], struck=11.5, deadline=30, margin=1)
    assert bool(wrong) == bool(complaint)
    assert complaint in "".join(wrong)
    assert lost == (not wrong and one.outcome != "right")


def test_a_deadline_is_no_fault_of_the_drafts() -> None:
    late = Result("whole", CASE, 10.0, 40.1, "deadline")
    assert assess(BY_NAME["verifier killed"], [late], struck=20.0, deadline=30, margin=1) == (1, [])
    for name, result in (
        ("draft killed", late),
        ("verifier killed", Result("whole", CASE, 10.0, 12.0, "deadline")),
    ):
        assert assess(BY_NAME[name], [result], struck=11.5, deadline=30, margin=1)[1]


def test_who_came_after_a_fault_may_be_refused() -> None:
    late = Result("whole", CASE, 11.5, 11.6, "unavailable", is_retryable=True)
    assert assess(BY_NAME["verifier killed"], [late], struck=11.0, deadline=30, margin=1) == (1, [])
    # As may who was still on the way.
    slow = Result("whole", CASE, 9.8, 12.3, "unavailable", is_retryable=True)
    assert assess(BY_NAME["verifier SIGTERM"], [slow], struck=11.0, deadline=30, margin=2) == (
        1,
        [],
    )
    assert assess(BY_NAME["verifier SIGTERM"], [slow], struck=11.0, deadline=30, margin=1)[1]


def test_garbled_bytes_are_others() -> None:
    data = bytes(range(64))
    changed = [garble(data, random.Random(seed)) for seed in range(20)]
    assert all(len(one) == 64 and one != data for one in changed)


def test_only_a_file_system_of_ones_own_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREDRAFT_CHAOS_ROOM", raising=False)
    room = Room()
    try:
        with pytest.raises(RuntimeError, match="not ours"):
            room.fill(room.disk)
        assert os.listdir(room.disk) == []
    finally:
        room.disk.rmdir()
