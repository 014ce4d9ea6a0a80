"""A private MPS daemon for a benchmark: two processes on one GPU hand over in microseconds instead of time slices."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def mps(enabled: bool) -> Iterator[bool]:
    """Runs a daemon while the block runs; processes started inside are its clients. Yields whether there is one."""
    if not enabled or shutil.which("nvidia-cuda-mps-control") is None:
        yield False
        return
    folder = tempfile.mkdtemp(prefix="mps-")
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    os.environ.update(dict.fromkeys(names, folder))
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        yield True
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False, timeout=30)
        for name in names:
            del os.environ[name]
        shutil.rmtree(folder, ignore_errors=True)
