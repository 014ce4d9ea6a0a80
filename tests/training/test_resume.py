"""The state of a run comes back exactly, from files of bounded size, also after a save that was cut
off.
"""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.errors import CheckpointError
from training import resume
from training.resume import drop_state, load_state, save_state


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "step": step,
        "head": {
            "large": torch.randn(30, 40, 2, generator=generator),
            "mask": torch.rand(7, generator=generator) > 0.5,
            "empty": torch.zeros(0, 3),
        },
        "optimizer": {
            "adam": {0: {"step": torch.tensor(float(step))}, "betas": (0.9, 0.95)},
            "muon": [torch.randn(100, generator=generator).bfloat16(), torch.randn(5, 5).t()],
        },
        "history": [{"loss": 0.1 + 0.2, "domain": "py"}],
    }


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, list | tuple):
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other


def test_a_state_comes_back_from_files_of_bounded_size(tmp_path: Path) -> None:
    saved, path = state(3), tmp_path / "checkpoint.pt"
    save_state(saved, path, part_bytes=1000)
    assert_equal(load_state(path), saved)
    parts = list(tmp_path.glob("checkpoint-*"))
    assert len(parts) > 9600 // 1000
    # The format itself takes a few KiB.
    assert max(part.stat().st_size for part in parts) < 1000 + 4096
    assert resume.PART_BYTES < 60 * 2**20


def test_the_next_save_replaces_all_files(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_state(state(3), path, part_bytes=1000)
    saved = state(4)
    save_state(saved, path, part_bytes=5000)
    assert_equal(load_state(path), saved)
    assert {file.name.split("-")[1] for file in tmp_path.glob("checkpoint-*")} == {"step4"}


def test_a_save_that_is_cut_off_leaves_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, path = state(3), tmp_path / "checkpoint.pt"
    save_state(saved, path, part_bytes=1000)

    save, num_written = torch.save, 0

    def fail(*arguments: Any) -> None:
        nonlocal num_written
        num_written += 1
        if num_written == 4:
            raise OSError("disk full")
        save(*arguments)

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        save_state(state(4), path, part_bytes=1000)
    assert_equal(load_state(path), saved)


def test_a_full_disk_is_an_os_error_and_leaves_the_state_before(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_state({"step": 1, "weight": torch.zeros(4)}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save_state({"step": 2, "weight": torch.ones(10_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_state(path)["step"] == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_state(state(3), path, part_bytes=1000)
    (tmp_path / "checkpoint-step3-2.pt").unlink()
    with pytest.raises(CheckpointError, match="checkpoint-step3-2"):
        load_state(path)


def test_a_dropped_state_leaves_nothing_but_what_is_no_part_of_it(tmp_path: Path) -> None:
    path, other = tmp_path / "checkpoint.pt", tmp_path / "checkpoints.txt"
    other.write_text("notes")
    save_state(state(3), path, part_bytes=1000)
    drop_state(path)
    assert list(tmp_path.iterdir()) == [other]
    drop_state(path)


@pytest.mark.parametrize("content", [b"junk", b"", b"\x80\x04N."])
def test_a_file_that_holds_no_state_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt is no state to resume from$"):
        load_state(path)


def test_a_state_of_another_command_is_no_state_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    saved = state(3)
    save_state(saved, path)
    assert_equal(load_state(path, ("head", "history")), saved)
    with pytest.raises(
        CheckpointError, match=r"checkpoint\.pt is no state to resume from: .*model"
    ):
        load_state(path, ("model", "history"))
