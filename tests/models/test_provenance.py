"""A checksum covers what is loaded: verifiers of one model agree, whatever lies beside it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from foredraft.models.loader import load_model
from foredraft.models.provenance import checksum, model_checksum
from testing.checkpoints import make_checkpoint

Sum = Callable[[Path], str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def edit(folder: Path, name: str = "config.json", **keys: Any) -> None:
    """Sets keys of a JSON file, and writes them in another order."""
    file = folder / name
    raw = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**keys, **{key: raw[key] for key in raw if key not in keys}}))


def shard(folder: Path) -> list[Path]:
    """Replaces the one file of weights by two and their index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where = {name: files[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name in where if where[name] == file}, file)
    index = {"weight_map": {name: file.name for name, file in where.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


@pytest.mark.parametrize("sum_of", [checksum, model_checksum])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_files_that_are_not_loaded_are_left_out(
    is_sharded: bool, sum_of: Sum, model: Path, copy: Path
) -> None:
    if is_sharded:
        shard(copy)
    before = sum_of(copy)
    for name in ("consolidated", "adapter_model", "model-00003-of-00003"):
        shutil.copy(model / "model.safetensors", copy / f"{name}.safetensors")
    (copy / "pytorch_model.bin").write_bytes(b"other weights")
    load_model(copy)
    assert sum_of(copy) == before


@pytest.mark.parametrize("sum_of", [checksum, model_checksum])
def test_every_shard_counts(sum_of: Sum, copy: Path) -> None:
    sums = {sum_of(copy)}
    for file in shard(copy):
        sums.add(sum_of(copy))
        tensors = load_file(file)
        name = min(tensors)
        tensors[name] += 1
        save_file(tensors, file)
    assert len(sums | {sum_of(copy)}) == 4


def test_bin_files_of_a_draft_count(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    sums = set()
    for content in (b"some", b"others"):
        (copy / "pytorch_model.bin").write_bytes(content)
        sums.add(checksum(copy))
    assert len(sums) == 2


def test_notes_in_the_configuration_change_nothing(model: Path, copy: Path) -> None:
    edit(
        copy,
        _name_or_path="/models/copy",
        transformers_version="9.9",
        my_note={"date": "today"},
        rms_norm_eps=float(json.loads((copy / "config.json").read_text())["rms_norm_eps"]),
    )
    edit(copy, "generation_config.json", temperature=0.6)
    assert model_checksum(copy) == model_checksum(model)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("config.json", {"rms_norm_eps": 0.125}),
        ("config.json", {"rope_parameters": None, "rope_theta": 777.0}),
        ("config.json", {"dtype": "float16"}),
        ("generation_config.json", {"eos_token_id": [3, 4]}),
    ],
)
def test_what_changes_texts_counts(
    name: str, keys: dict[str, Any], model: Path, copy: Path
) -> None:
    edit(copy, name, **keys)
    assert model_checksum(copy) != model_checksum(model)


def test_models_whose_weights_are_not_loaded_have_one(copy: Path) -> None:
    for file in shard(copy):
        file.unlink()
    assert model_checksum(copy)
