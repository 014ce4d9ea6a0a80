"""`train draft --resume` ends with the same head, and goes on from no other run's checkpoint."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.errors import CheckpointError, ConfigError
from testing.draft_training import draft_config
from training.draft.trainer import DraftTrainer
from training.resume import load_state, save_state


def test_a_resumed_run_ends_with_the_same_head_bit_for_bit(
    toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    whole = DraftTrainer(draft_config(toy_target, tmp_path / "whole", steps=6, validation=()))
    whole.run()
    first = DraftTrainer(draft_config(toy_target, tmp_path / "parts", steps=6, validation=()))
    for _ in range(2):
        first._train_step()
    first._save_checkpoint()
    second = DraftTrainer(
        draft_config(toy_target, tmp_path / "parts", steps=6, validation=(), resume=True)
    )
    assert second.step == 2
    second.run()
    for (name, ours), theirs in zip(
        second.head.state_dict().items(), whole.head.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_a_new_run_in_an_old_folder_leaves_no_checkpoint_to_resume_from(
    toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    config = draft_config(toy_target, tmp_path, steps=3, validation=())
    DraftTrainer(config).run()
    bad = dataclasses.replace(config, data=(tmp_path / "nowhere",))
    with pytest.raises(ConfigError, match="no such file"):
        DraftTrainer(bad)
    assert (tmp_path / "checkpoint.pt").is_file(), "a mistake costs nothing"
    DraftTrainer(config)
    resumed = DraftTrainer(dataclasses.replace(config, resume=True))
    assert resumed.step == 0


def test_only_a_checkpoint_of_the_same_head_and_target_is_resumed(
    toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    changes = {"windows": 0, "generated": None, "validation": ()}
    config = draft_config(toy_target, tmp_path / "head", **changes)
    DraftTrainer(config)._save_checkpoint()
    config = dataclasses.replace(config, resume=True)
    moved = shutil.copytree(toy_target[1], tmp_path / "moved")
    DraftTrainer(dataclasses.replace(config, target=moved))
    for change, message in (
        ({"algorithm": "MTP"}, "is of --algorithm EAGLE3, not MTP"),
        ({"target": other_target(toy_target, tmp_path)}, "is of another target, target"),
        ({"draft_vocab_size": 150}, "holds another head: draft_vocab_size 200$"),
    ):
        with pytest.raises(CheckpointError, match=rf"checkpoint\.pt {message}"):
            DraftTrainer(dataclasses.replace(config, **change))


def test_a_checkpoint_of_an_earlier_version_is_resumed(
    toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    config = draft_config(toy_target, tmp_path, windows=0, generated=None, validation=())
    first = DraftTrainer(config)
    first._train_step()
    first._save_checkpoint()
    path = tmp_path / "checkpoint.pt"
    state = load_state(path)
    del state["shape"], state["target"]
    save_state(state, path)
    assert DraftTrainer(dataclasses.replace(config, resume=True)).step == 1
    with pytest.raises(CheckpointError) as refused:
        DraftTrainer(dataclasses.replace(config, algorithm="MTP", resume=True))
    assert str(refused.value) == f"{path} is no MTP head of these sizes"


def other_target(toy_target: tuple[Path, Path], folder: Path) -> Path:
    """Writes a target that differs from another one in few weights."""
    other = folder / "other"
    shutil.copytree(toy_target[1], other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return other


def test_what_another_target_wrote_is_not_taken(
    toy_target: tuple[Path, Path], tmp_path: Path
) -> None:
    changes = {"generated": tmp_path / "generated", "windows": 2, "generate_batch": 2}
    DraftTrainer(draft_config(toy_target, tmp_path / "head", validation=(), **changes))
    changes["target"] = other_target(toy_target, tmp_path)
    with pytest.raises(ConfigError, match=r"another model wrote .*generated\.npy; delete it"):
        DraftTrainer(draft_config(toy_target, tmp_path / "head", validation=(), **changes))
