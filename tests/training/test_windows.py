"""The windows that a target writes: more of them are other ones, and a broken file is named."""

from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.errors import ConfigError
from training.draft.target import Target
from training.draft.windows import WindowPlan, write_windows

LENGTH = 20
STREAM = np.random.default_rng(0).integers(3, 300, 100_000, dtype=np.int32)


@pytest.fixture(scope="module")
def target(toy_target: tuple[Path, Path]) -> Target:
    return Target(toy_target[1], torch.device("cpu"), torch.float32)


def written(target: Target, out: Path, count: int, batch: int, prompt: int = 9) -> np.ndarray:
    plan = WindowPlan(count, prompt, LENGTH, batch, (0.0, 1.0), seed=1)
    return write_windows(target, STREAM, out, plan)


@pytest.mark.parametrize(("first", "second"), [((6, 16), (12, 16)), ((8, 4), (16, 8))])
def test_windows_that_a_later_run_adds_are_not_those_of_the_first(
    first: tuple[int, int], second: tuple[int, int], target: Target, tmp_path: Path
) -> None:
    before = written(target, tmp_path, *first)
    after = written(target, tmp_path, *second)
    assert np.array_equal(after[: len(before)], before)
    prompts = {row.tobytes() for row in after[:, :9]}
    assert len(prompts) == len(after)


def test_a_run_that_goes_on_writes_what_an_unbroken_one_does(
    target: Target, tmp_path: Path
) -> None:
    for name in ("parts", "whole"):
        (tmp_path / name).mkdir()
    written(target, tmp_path / "parts", 4, 4)
    parts = written(target, tmp_path / "parts", 12, 4)
    assert np.array_equal(parts, written(target, tmp_path / "whole", 12, 4))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generated.npy", b"junk"),
        ("generated.npy", b""),
        ("generated.npy", b"\x93NUMPY\x01\x00"),
        ("generated.json", b"junk"),
    ],
)
def test_a_broken_file_of_windows_is_named(
    name: str, content: bytes, target: Target, tmp_path: Path
) -> None:
    written(target, tmp_path, 2, 2)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read; delete it"):
        written(target, tmp_path, 4, 2)


def test_a_file_that_holds_no_windows_is_named(target: Target, tmp_path: Path) -> None:
    np.save(tmp_path / "generated.npy", np.arange(LENGTH))
    with pytest.raises(ConfigError, match=r"generated\.npy: cannot be read; delete it"):
        written(target, tmp_path, 4, 2)
