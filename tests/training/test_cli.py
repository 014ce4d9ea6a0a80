"""`foredraft train` as a command: what it teaches, and which names of targets it knows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.cli.main import main

SMALL = ["--prompt=8", "--window=24", "--generate-batch=4", "--batch=2", "--steps=2", "--warmup=1"]
TEXT = "def add(left, right):\n    return left + right\n\n\n"


def test_without_a_command_it_says_what_can_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 0
    text = capsys.readouterr().out
    for part in ("corpus", "lm", "draft", "baselines", "token-map", "DSPARK", "PEAGLE"):
        assert part in text
    assert "docs/training.md" in text


def test_a_bundled_target_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text(TEXT * 40)
    out = tmp_path / "head"
    flags = ["--target=foredraft-demo", f"--data={tmp_path / 'text.py'}", f"--out={out}"]
    sizes = ["--algorithm=EAGLE", "--windows=2", "--text-windows=2", "--device=cpu"]
    assert main(["train", "draft", *flags, *sizes, *SMALL]) == 0
    assert json.loads((out / "config.json").read_text())["target_model"] == "foredraft-demo"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target=foredraft-demos"], "foredraft-demos: no such directory or file; known names:"),
        (["--target=foredraft-demo"], "--data: there is no text"),
    ],
)
def test_bad_input_leaves_no_folder(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    assert main(["train", "draft", *flags, f"--out={out}", "--windows=2", "--device=cpu"]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_threads_sleep_while_they_wait_unless_the_environment_says_otherwise() -> None:
    program = "import os, training; print(os.environ['OMP_WAIT_POLICY'])"
    without = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for environment, policy in (
        (without, "PASSIVE"),
        (without | {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.strip() == policy
