"""What the commands below `foredraft train` share."""

import argparse
import math
from collections.abc import Callable
from typing import TypeAlias

AddArgument = Callable[..., object]  # of `argparse.ArgumentParser`
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def resolve_device(name: str) -> str:
    """Returns the device type for a name; `auto` is CUDA where there is a device, else the CPU.

    Raises:
        ConfigError: CUDA was requested, and no usable device was found.
    """
    from foredraft.attention.choice import device_for

    return device_for(name).type


def add_checkpoint_flags(add: AddArgument) -> None:
    """Adds when a training writes checkpoints, and when it stops."""
    add(
        "--checkpoint-every",
        type=int,
        default=0,
        help="steps between checkpoints; 0 = only at the end",
    )
    add("--max-minutes", type=float, default=math.inf, help="stop with a checkpoint after so long")
