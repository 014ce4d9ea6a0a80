"""What the commands below `foredraft train` share."""

import argparse
from typing import TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def resolve_device(name: str) -> str:
    """Returns the device type for a name; `auto` is CUDA where there is a device, else the CPU.

    Raises:
        ConfigError: CUDA was requested, and no usable device was found.
    """
    from foredraft.attention.choice import device_for

    return device_for(name).type
