"""Measures the gain of a kernel cache: starts `foredraft serve` on a GPU with an empty Triton cache,
then with the cache that this start left.

    python -m benchmarks.gpu.cold_start --speculative-algorithm EAGLE3 --speculative-draft-model-path foredraft-demo-eagle3

All flags are those of `foredraft serve`, which --help lists. Prints seconds until all three are
healthy, and how many kernels were compiled.
"""  # noqa: E501

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SERVE = (sys.executable, "-m", "foredraft.cli.main", "serve")
STARTS = ("empty cache", "kept cache", "kept cache")


def main(flags: Sequence[str]) -> int:
    """Returns 0 when the later starts compiled nothing."""
    if not {"-h", "--help"}.isdisjoint(flags):
        print(__doc__)
        return subprocess.run([*SERVE, "--help"]).returncode
    # So that the first start does not also read torch from a cold disk.
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    compiled = []
    with tempfile.TemporaryDirectory(prefix="kernels-") as cache:
        known: set[Path] = set()
        for name in STARTS:
            seconds = _start(flags, cache)
            kernels = set(Path(cache).rglob("*.cubin"))
            compiled.append(len(kernels - known))
            known = kernels
            print(f"{name}: ready after {seconds:.1f} s, {compiled[-1]} kernels compiled")
    return 1 if any(compiled[1:]) else 0


def _start(flags: Sequence[str], cache: str) -> float:
    """Starts and stops the services; returns the seconds until they were healthy."""
    command = [*SERVE, "--device=cuda", "--port=0", "--grpc-port=0", *flags]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    started = time.monotonic()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as serve:
        assert serve.stdout is not None
        lines = []
        seconds = None
        for line in serve.stdout:
            lines.append(line)
            if seconds is None and re.search(r"ready after [\d.]+ s", line):
                seconds = time.monotonic() - started
                serve.send_signal(signal.SIGINT)
    if seconds is None:
        raise SystemExit("it did not start:\n" + "".join(lines))
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
