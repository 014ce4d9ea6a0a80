"""Tests what a verifier logs about its flags when it starts."""

from pathlib import Path

import pytest

from testing.checkpoints import make_checkpoint
from testing.engines import running_engine


def test_flags_of_sglang_that_change_nothing_have_a_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    taken = {
        "enable_torch_compile": True,
        "torch_compile_max_bs": 8,
        "speculative_attention_mode": "decode",
    }
    with running_engine(make_checkpoint(tmp_path / "model"), **taken):
        pass
    lines = [one for one in caplog.messages if "change nothing" in one or "changes nothing" in one]
    assert [line.split()[0] for line in lines] == [
        "--enable-torch-compile",
        "--speculative-attention-mode",
    ]
    assert "--torch-compile-max-bs" in lines[0]
    caplog.clear()
    with running_engine(tmp_path / "model"):
        pass
    assert "nothing" not in caplog.text
