"""Checkpoints as they are written: what was given, and readable by whoever the folder's owner lets
read.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from training.export import SHARD_BYTES, load_tensors, save_sharded
from training.token_map import write_token_map


@pytest.fixture
def everybody_reads() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.usefixtures("everybody_reads")
def test_files_hold_the_tensors_and_may_be_read(tmp_path: Path, num_parts: int) -> None:
    size = SHARD_BYTES // 4 // 2 + 1  # of float32: two do not fit one file
    tensors = {str(i): torch.full((size,), float(i)) for i in range(num_parts)}
    files = save_sharded(tensors, tmp_path)
    assert len(files) == num_parts
    found = load_tensors(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    write_token_map([2, 1], tmp_path / "map.pt")
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644, file.name
