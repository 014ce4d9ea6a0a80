"""Draws the time line of decode steps on one GPU: work of verifier and draft, idle time of the GPU,
work of the host.

    python -m benchmarks.gpu.timeline --modes chain tree --batch 1 32 --mps

8B shape, random weights, SIMULATED acceptance, as in `benchmarks.gpu.decode`. Both processes stamp
the begin and the end of every captured graph with the GPU's clock (`benchmarks.gpu.stamps`; a stamp
costs the step about 2 microseconds).
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.runs import run_batch, watched_waits
from benchmarks.gpu.shapes import MODES, flags_of, write_checkpoints
from benchmarks.results_folder import results_folder
from foredraft.cli import mps
from testing.drafts import DraftProcess
from testing.engines import Harness, running_engine

STEPS = 20  # number of steps that are shown
COLORS = ("gray", "orange", "blue")
Spans = list[tuple[float, float]]
Summary = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", default=["chain"], choices=list(MODES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=320)
    parser.add_argument("--layers", type=int, default=32, help="fewer for debugging")
    parser.add_argument("--mps", action="store_true", help="run under a private MPS daemon")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    parser.add_argument("--flags", type=json.loads, default={}, help="more flags, as JSON")
    args = parser.parse_args()
    need_gpu()
    found = []
    with tempfile.TemporaryDirectory() as folder, mps.running(args.mps) as variables:
        os.environ.update(variables)
        target, head = write_checkpoints(Path(folder), args.layers)
        timeline = Timeline(Path(folder) / "draft.json")
        for mode in args.modes:
            found += _measure(mode, target, head, args, timeline)
        for name in variables:
            del os.environ[name]
    report(found, args.out)
    return 0


class Timeline:
    """Watches engines whose drafts start after it was made.

    Args:
        draft_file: File for the stamps of the draft's process.
    """

    def __init__(self, draft_file: Path) -> None:
        from benchmarks.gpu.stamps import Stamps

        self._stamps = Stamps()
        self._draft_file = draft_file
        os.environ["STAMPS_FILE"] = str(draft_file)
        DraftProcess.module = "benchmarks.gpu.stamps"

    def of(self, harness: Harness, mode: str, batch: int, prompt: int, output: int) -> Summary:
        """Returns the time line of one batch."""
        from benchmarks.gpu.stamps import draft_spans

        stamps = self._stamps
        stamps.start()
        with watched_waits() as waits:
            run_batch(harness, batch, prompt, 48)
            offset = stamps.host_offset()
            draft_spans(harness, self._draft_file)
            waits.clear()
            run_batch(harness, batch, prompt, output)
        verifier, draft = stamps.spans(), draft_spans(harness, self._draft_file)
        stamps.stop()
        return _summary(mode, batch, verifier, draft, _busy(waits, offset))


def _measure(
    mode: str, target: Path, head: Path, args: argparse.Namespace, timeline: Timeline
) -> list[Summary]:
    algorithm, flags = flags_of(mode, head, max(args.batch), args.prompt + args.output)
    with running_engine(target, algorithm, **flags, **args.flags) as harness:
        return [timeline.of(harness, mode, batch, args.prompt, args.output) for batch in args.batch]


def _busy(waits: Spans, offset: float) -> Spans:
    """Returns the spans in which the verifier's host did not wait, in microseconds of the GPU's
    clock.
    """
    return [
        (end * 1e6 - offset, begin * 1e6 - offset)
        for (_, end), (begin, _) in itertools.pairwise(waits)
    ]


def _summary(mode: str, batch: int, verifier: Spans, draft: Spans, host: Spans) -> Summary:
    """Returns times of a step in microseconds, medians over the steps in the middle of the run."""
    middle = len(verifier) // 2
    shown = verifier[middle : middle + STEPS + 1]
    periods, target, drafting, idle = [], [], [], []
    for (begin, end), (following, _) in itertools.pairwise(shown):
        own = [span for span in draft if end <= span[0] < following]
        used = sum(stop - start for start, stop in own)
        periods.append(following - begin)
        target.append(end - begin)
        drafting.append(used)
        idle.append(following - end - used)
    first, last = shown[0][0], shown[-1][0]
    return {
        "mode": mode,
        "batch": batch,
        "step": float(np.median(periods)),
        "target": float(np.median(target)),
        "draft": float(np.median(drafting)),
        "idle": float(np.median(idle)),
        "idle_max": float(np.max(idle)),
        "host": float(np.median([end - begin for begin, end in host])) if host else 0.0,
        "verifier": [(a - first, b - first) for a, b in shown[:-1]],
        "drafts": [(a - first, b - first) for a, b in draft if first <= a < last],
        "hosts": [(a - first, b - first) for a, b in host if first <= a < last],
    }


def report(found: list[Summary], out: Path) -> None:
    """Table, JSON and picture."""
    (out / "gpu_timeline.json").write_text(json.dumps(found, indent=1))
    _plot(found, out / "gpu_timeline.png")
    print("microseconds a step, medians of 20 consecutive steps; acceptance is SIMULATED")
    print(f"{'mode':6} {'batch':>5} {'step':>7} {'target':>7} {'draft':>6} {'idle':>6} {'host':>6}")
    for one in found:
        print(
            f"{one['mode']:6} {one['batch']:5} {one['step']:7.0f} {one['target']:7.0f} "
            f"{one['draft']:6.0f} {one['idle']:6.0f} {one['host']:6.0f}"
        )


def _plot(found: list[Summary], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(found), 1, figsize=(10, 1.2 + 1.4 * len(found)), squeeze=False, layout="constrained"
    )
    for axis, one in zip(axes[:, 0], found, strict=True):
        for row, name in enumerate(("hosts", "drafts", "verifier")):
            bars = [(a / 1e3, (b - a) / 1e3) for a, b in one[name]]
            axis.broken_barh(bars, (row, 0.8), color=f"tab:{COLORS[row]}")
        axis.set_yticks([0.4, 1.4, 2.4], ["host", "draft", "target"])
        axis.set_title(
            f"{one['mode']}, batch {one['batch']}: {one['step'] / 1e3:.2f} ms a step, GPU idle "
            f"{one['idle']:.0f} us, host {one['host']:.0f} us",
            fontsize=9,
        )
    axes[-1, 0].set_xlabel("ms")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
