"""The soak finds what grows, and its requests get the answers that they have to get."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing import tools
from testing.soak_growth import growth
from testing.stack import make_model


def samples(leak: dict[str, float], count: int = 200) -> list[dict[str, Any]]:
    """Noisy samples of ten seconds each; `leak` is what a quantity gains over the whole time."""
    choose = random.Random(3)
    found = []
    for i in range(count):
        part = i / count

        def value(name: str, level: float, noise: float, part: float = part) -> float:
            return level + leak.get(name, 0.0) * part + choose.uniform(-noise, noise)

        process = {
            "rss_mib": value("rss_mib", 500, 15),
            "private_mib": value("private_mib", 400, 15),
            "descriptors": round(value("descriptors", 22, 3)),
            "threads": round(value("threads", 16, 0.4)),
        }
        engine = {"kv_pages_held": round(value("kv_pages_held", 250, 4))}
        segments = round(value("segments", 0, 0))
        found.append(
            {
                "seconds": 10.0 * i,
                "processes": {"verify": process},
                "engine": engine,
                "segments": segments,
            }
        )
    return found


def test_noise_is_no_growth() -> None:
    rows = growth(samples({}), 0.2)
    assert len(rows) == 6
    assert not [row["what"] for row in rows if row["grew"]]


@pytest.mark.parametrize(
    ("kind", "gain"),
    [
        ("rss_mib", 40),
        ("private_mib", 40),
        ("descriptors", 12),
        ("threads", 4),
        ("kv_pages_held", 30),
        ("segments", 3),
    ],
)
def test_a_slow_leak_is_found(kind: str, gain: float) -> None:
    rows = growth(samples({kind: gain}), 0.2)
    grown = [row for row in rows if row["grew"]]
    assert len(grown) == 1
    what = {"kv_pages_held": "KV pages held", "segments": "shared-memory segments"}
    assert grown[0]["what"] == what.get(kind, f"verify {kind}")
    assert grown[0]["per_hour"] == pytest.approx(gain * 3600 / 2000, rel=0.35)


def test_what_fills_in_the_warm_up_is_no_growth() -> None:
    found = samples({})
    for i, sample in enumerate(found[:30]):
        sample["engine"]["kv_pages_held"] = 8 * i
    assert not [row for row in growth(found, 0.2) if row["grew"]]


def test_what_rises_and_then_stays_is_no_growth() -> None:
    found = samples({})
    for i, sample in enumerate(found):
        sample["processes"]["verify"]["rss_mib"] += 40 * min(1.0, i / 120)
    assert not [row for row in growth(found, 0.2) if row["grew"]]


@pytest.mark.slow
def test_a_short_soak_answers_everything_rightly(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny", context_length=1024)
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.12", "--interval", "0.5"]
    command += ["--pause", "0", "--clients", "3", "--output", str(tmp_path / "soak"), "--"]
    command += ["--model-path", str(model), "--device", "cpu"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tools.ROOT, timeout=840)
    # It may call 7 seconds too short to be flat.
    assert ran.returncode in (0, 1), ran.stderr
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["unexpected"] == []
    assert sum(report["outcomes"].values()) > 5
    assert set(report["samples"][-1]["processes"]) == {"gateway", "verify", "draft", "client"}
    idle = report["idle"]["engine"]
    assert idle["kv_pages_used"] == idle["running"] == idle["queued"] == 0
    assert report["left_segments"] == []
    assert report["left_directory"] is False
    assert (tmp_path / "soak.png").stat().st_size > 10_000
