"""How many variants of each Triton kernel this process has compiled, or taken from Triton's files."""

import sys
from collections import Counter


def compiled() -> Counter[str]:
    """By kernel, in all modules of this project that were imported."""
    from triton.runtime.jit import JITFunction

    found: Counter[str] = Counter()
    for name, module in list(sys.modules.items()):
        if name.startswith("foredraft."):
            for kernel in vars(module).values():
                if isinstance(kernel, JITFunction) and kernel.fn.__module__ == name:
                    found[f"{name}.{kernel.fn.__name__}"] = sum(
                        len(caches[0]) for caches in kernel.device_caches.values()
                    )
    return found


def compiled_since(before: Counter[str]) -> Counter[str]:
    """What was added."""
    return compiled() - before
