"""Finds the files that hold a checkpoint's weights. Torch-free."""

import json
from pathlib import Path

from foredraft.errors import CheckpointError


def checkpoint_files(directory: Path) -> list[Path]:
    """Returns the paths of a checkpoint's weight files.

    Raises:
        CheckpointError: There are none, one is missing, or the index is broken.
    """
    if files := weight_files(directory, "model.safetensors"):
        for file in files:
            if not file.is_file():
                raise CheckpointError(
                    f"{directory / 'model.safetensors.index.json'} names {file.name}, which is not"
                    " there"
                )
        return files
    others = sorted(directory.glob("pytorch_model*.bin"))
    hint = f" (it has {others[0].name}; convert it to safetensors)" if others else ""
    raise CheckpointError(f"{directory}: no model.safetensors and no index of several{hint}")


def weight_files(directory: Path, name: str) -> list[Path]:
    """Returns the file `name`, else those that `<name>.index.json` lists, else none.

    An index beside the one file is a leftover.

    Raises:
        CheckpointError: The index is broken.
    """
    single, index = directory / name, directory / f"{name}.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of weights: {error!r}") from error
    for file in names:
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: {file!r} is not a file beside the index")
    return [directory / file for file in names]
