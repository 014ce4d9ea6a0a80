"""`draft_service` that reports its GPU resources: `python -m testing.counted_draft --listen ...`.

An empty file `COUNT_FILE.pid` asks for the report, which is written into it.
"""

import json
import os
import runpy
import threading
import time
from pathlib import Path
from typing import Any

import torch

from foredraft.transport import cuda

POLL_SECONDS = 0.02
num_mappings = 0


def count_mappings() -> None:
    """Starts counting the mappings of other processes' memory."""
    make, close = cuda.Mapping.__init__, cuda.Mapping.close

    def made(self: cuda.Mapping, *args: Any) -> None:
        global num_mappings
        make(self, *args)
        num_mappings += 1

    def closed(self: cuda.Mapping) -> None:
        global num_mappings
        num_mappings -= 1
        close(self)

    cuda.Mapping.__init__ = made  # type: ignore[method-assign]
    cuda.Mapping.close = closed  # type: ignore[method-assign]


def account() -> dict[str, int]:
    """Returns the present GPU resources of this process."""
    return {
        "allocated": torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0,
        "mappings": num_mappings,
    }


def ask(prefix: Path, pid: int, timeout: float = 10.0) -> dict[str, int]:
    """Returns the account of such a process."""
    path = prefix.with_name(f"{prefix.name}.{pid}")
    path.touch()
    deadline = time.monotonic() + timeout
    while path.stat().st_size == 0:
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} does not say what it has")
        time.sleep(POLL_SECONDS)
    told: dict[str, int] = json.loads(path.read_text())
    path.unlink()
    return told


def main() -> None:
    count_mappings()
    prefix = Path(os.environ["COUNT_FILE"])
    path = prefix.with_name(f"{prefix.name}.{os.getpid()}")

    def answer() -> None:
        while True:
            time.sleep(POLL_SECONDS)
            if path.exists() and path.stat().st_size == 0:
                written = path.with_name(f"{path.name}.new")
                written.write_text(json.dumps(account()))
                written.rename(path)

    threading.Thread(target=answer, daemon=True).start()
    runpy.run_module("draft_service", run_name="__main__")


if __name__ == "__main__":
    main()
