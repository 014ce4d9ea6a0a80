"""Where a draft's checkpoint comes from: its algorithm and sizes, and its target."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError
from training.draft.target import Target


def origin_of(shape: Any, target: Target) -> dict[str, Any]:
    """Returns plain values for a checkpoint.

    Args:
        shape: Configuration of the head, a dataclass with its `algorithm`.
        target: Target that the head is trained for.
    """
    return {"shape": asdict(shape), "target": target.identity()}


def check_origin(path: Path, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Compares a checkpoint with the run that is to go on from it.

    Args:
        path: File of the checkpoint.
        state: What is in it; earlier versions wrote no origin, and theirs pass.
        own: Origin of the run.

    Raises:
        CheckpointError: It is of another algorithm, target or size.
    """
    if not own.keys() <= state.keys():
        return
    was, now = state["shape"], own["shape"]
    if was["algorithm"] != now["algorithm"]:
        raise CheckpointError(
            f"{path} is of --algorithm {was['algorithm']}, not {now['algorithm']}"
        )
    # Its name does not matter: a folder may have moved.
    if state["target"]["sha256"] != own["target"]["sha256"]:
        raise CheckpointError(f"{path} is of another target, {state['target']['model']}")
    others = [f"{name} {was.get(name)}" for name in now if was.get(name) != now[name]]
    if others:
        raise CheckpointError(f"{path} holds another head: {', '.join(others)}")
