"""Pages that are made from the code are as the code is."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_flags_and_metrics_pages_are_fresh() -> None:
    # A process of its own: in this one, tests may have declared metrics.
    result = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
