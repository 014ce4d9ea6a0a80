"""A small run of `foredraft train draft`, for tests."""

import dataclasses
from pathlib import Path

from training.draft.config import DraftTrainingConfig


def draft_config(toy: tuple[Path, Path], out: Path, **changes: object) -> DraftTrainingConfig:
    """Returns the settings of a run.

    Args:
        toy: Folder with text in `train` and `heldout`, and folder of a target.
        out: Folder of the head.
        changes: Fields with other values.
    """
    folder, target = toy
    config = DraftTrainingConfig(
        target=target,
        algorithm="EAGLE3",
        data=(folder / "train",),
        validation=(folder / "heldout",),
        generated=folder / "generated",
        out=out,
        windows=64,
        text_windows=64,
        prompt=32,
        window=96,
        generate_batch=32,
        steps=80,
        warmup=10,
        batch=8,
        lr=5e-3,
        unroll_steps=3,
        draft_vocab_size=200,
        depth=3,
        topk=3,
        tree_tokens=10,
        eval_prompts=8,
        eval_prompt=32,
        eval_new_tokens=32,
        compile=False,
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]
