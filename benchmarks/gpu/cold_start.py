"""Measures the gain of a kernel cache: starts `foredraft serve` on a GPU with an empty Triton cache,
then with the cache that this start left.

    python -m benchmarks.gpu.cold_start --speculative-algorithm EAGLE3 --speculative-draft-model-path foredraft-demo-eagle3

All flags are those of `foredraft serve`, which --help lists. Prints seconds until all services are
healthy and until drafts take part, and how many kernels were compiled.
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
READY, DRAFTING = r"ready after [\d.]+ s", "drafting from"


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
            ready, drafting = _start(flags, cache)
            kernels = set(Path(cache).rglob("*.cubin"))
            compiled.append(len(kernels - known))
            known = kernels
            since = "" if drafting is None else f"drafting after {drafting:.1f} s, "
            print(f"{name}: ready after {ready:.1f} s, {since}{compiled[-1]} kernels compiled")
    return 1 if any(compiled[1:]) else 0


def _start(flags: Sequence[str], cache: str) -> tuple[float, float | None]:
    """Starts and stops the services.

    Returns:
        Seconds until they were healthy, and until drafts took part; None for the second without
        drafts.
    """
    command = [*SERVE, "--device=cuda", "--port=0", "--grpc-port=0", *flags]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    awaited = [READY] if "NONE" in " ".join(flags).replace("=", " ").split() else [READY, DRAFTING]
    found: dict[str, float] = {}
    started = time.monotonic()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as serve:
        assert serve.stdout is not None
        lines = []
        for line in serve.stdout:
            lines.append(line)
            for event in awaited:
                if event not in found and re.search(event, line):
                    found[event] = time.monotonic() - started
                    if len(found) == len(awaited):
                        serve.send_signal(signal.SIGINT)
    if len(found) < len(awaited):
        raise SystemExit("it did not start:\n" + "".join(lines))
    return found[READY], found.get(DRAFTING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
