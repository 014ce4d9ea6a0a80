"""Records begin and end of each captured graph of a process by the GPU's own clock, which all
processes share.

As a program it is `draft_service` with stamps: `python -m benchmarks.gpu.stamps --listen ...`; it
writes them to the file that `STAMPS_FILE` names when that file is there and empty.
"""

# mypy: ignore-errors
import json
import os
import runpy
import threading
import time
from pathlib import Path

import torch

CAPACITY = 1 << 16


class Stamps:
    """Puts two tiny kernels around every replay of a graph in this process, from `start` on."""

    def __init__(self) -> None:
        self._times = None
        self._count = 0
        self._replay = torch.cuda.CUDAGraph.replay

    def start(self) -> None:
        """Starts stamping replays."""
        replay, stamps = self._replay, self

        def stamped(graph) -> None:
            stamps._put()
            replay(graph)
            stamps._put()

        torch.cuda.CUDAGraph.replay = stamped

    def stop(self) -> None:
        """Stops stamping replays."""
        torch.cuda.CUDAGraph.replay = self._replay

    def clear(self) -> None:
        """Drops all stamps."""
        self._count = 0

    def spans(self) -> list[tuple[float, float]]:
        """Returns begin and end of every replay, in microseconds."""
        if self._times is None:
            return []
        torch.cuda.synchronize()
        times = (self._times[: self._count].double() * 1e-3).tolist()
        return list(zip(times[::2], times[1::2], strict=True))

    def host_offset(self) -> float:
        """Returns the difference of `time.perf_counter` and the GPU's clock, in microseconds,
        to about 10 of them.
        """
        best, offset = float("inf"), 0.0
        for _ in range(50):
            self.clear()
            torch.cuda.synchronize()
            before = time.perf_counter()
            self._put()
            torch.cuda.synchronize()
            after = time.perf_counter()
            if after - before < best:
                stamp = float(self._times[0].double()) * 1e-3
                best, offset = after - before, (before + after) / 2 * 1e6 - stamp
        self.clear()
        return offset

    def _put(self) -> None:
        if self._times is None:
            self._times = torch.zeros(CAPACITY, dtype=torch.int64, device="cuda")
        if self._count < CAPACITY:
            from benchmarks.gpu.stamp_kernel import stamp

            stamp[(1,)](self._times[self._count :])
            self._count += 1


def draft_spans(harness, path: Path) -> list[tuple[float, float]]:
    """Returns the spans that the draft's process stamped since the last call."""
    if harness.draft is None:
        return []
    path.write_bytes(b"")
    while path.stat().st_size == 0:
        time.sleep(0.01)
    return json.loads(path.read_text())


def _write_stamps(path: Path) -> None:
    stamps = Stamps()
    stamps.start()

    def dump() -> None:
        while True:
            time.sleep(0.05)
            if path.exists() and path.stat().st_size == 0:
                written = path.with_suffix(".tmp")
                written.write_text(json.dumps(stamps.spans()))
                written.rename(path)
                stamps.clear()

    threading.Thread(target=dump, daemon=True).start()


def main() -> None:
    if "STAMPS_FILE" in os.environ:
        _write_stamps(Path(os.environ["STAMPS_FILE"]))
    runpy.run_module("draft_service", run_name="__main__")


if __name__ == "__main__":
    main()
