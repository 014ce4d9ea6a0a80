"""Counts the variants of each Triton kernel that this process has compiled, or loaded from
Triton's files.
"""

import sys
from collections import Counter


def compiled() -> Counter[str]:
    """Counts variants by kernel, in all imported modules of this project."""
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
    """Returns the variants that were added since an earlier count."""
    return compiled() - before
