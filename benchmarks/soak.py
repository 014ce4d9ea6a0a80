"""Does anything grow? Mixed load on a real stack for a long time, while memory, descriptors, threads, KV pages and
shared-memory segments of every process are watched.

    python -m benchmarks.soak --minutes 60 --output benchmarks/results/soak
    python -m benchmarks.soak --minutes 45 --output /tmp/soak -- --speculative-algorithm EAGLE3 \\
        --speculative-draft-model-path foredraft-demo-eagle3

What follows `--` are flags of `foredraft serve`. Writes OUTPUT.json (again and again while it runs) and OUTPUT.png, and
ends with 1 if something grew, was left behind, or was answered otherwise than it had to be.
"""

import argparse
import asyncio
import collections
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.soak_load import KEYS, Load
from foredraft.cli import serve, stack
from foredraft.cli.supervisor import Supervisor

MIB = 2**20
# What may come on top of the level after the warm-up before it counts as growth: a part of it, or so much.
TOLERANCES = {
    "rss_mib": (0.03, 6.0),
    "private_mib": (0.03, 6.0),
    "descriptors": (0.0, 4.0),
    "threads": (0.0, 1.0),
    "kv_pages_held": (0.0, 8.0),
    "segments": (0.0, 0.0),
}
# A bounded trie and a small pool, so that what may fill has filled when the warm-up ends.
BOUNDS = {"speculative_ngram_capacity": 20_000, "max_total_tokens": 8192}
# Of a machine that is busy with other things, so that lateness is not taken for death.
PATIENCE = {"draft_step_timeout": 20.0, "num_threads": 1, "log_level": "warning"}
# Figures that are 0 when nothing runs, and how long that may take.
AT_REST = ("kv_pages_used", "running", "queued")
IDLE_SECONDS = 60.0
METRICS = {
    "foredraft_kv_pages_used": "kv_pages_used",
    "foredraft_kv_pages_cached": "kv_pages_cached",
    "foredraft_kv_pages": "kv_pages",
    "foredraft_running_sequences": "running",
    "foredraft_queue_depth": "queued",
    "foredraft_draft_attaches_total": "attaches",
    "foredraft_draft_failures_total": "draft_failures",
    "foredraft_generation_tokens_total": "tokens",
    "foredraft_preemptions_total": "preemptions",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument(
        "--pause", type=float, default=0.2, help="seconds between a client's requests"
    )
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--warm-up", type=float, default=0.2, help="part of the time not judged")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/soak"))
    parser.add_argument(
        "--judge", type=Path, help="only judge and draw the report of an earlier run"
    )
    parser.add_argument("serve_flags", nargs="*", help="flags of foredraft serve, behind --")
    arguments = parser.parse_args()
    if arguments.judge:
        report = json.loads(arguments.judge.read_text())
        report["growth"] = growth(report["samples"], arguments.warm_up)
        draw(report, arguments.output.with_suffix(".png"))
        return verdict(report)
    given = serve.read_values(serve.make_parser().parse_args(arguments.serve_flags))
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"{key} {key}\n" for key in KEYS))
        values = {
            "port": 0,
            "grpc_port": 0,
            "api_key_file": str(keys),
            **BOUNDS,
            **PATIENCE,
            **given,
        }
        return _soak(stack.resolve_models(values), arguments, given)


def _soak(values: dict[str, Any], arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lines: collections.deque[str] = collections.deque(maxlen=200)
    supervisor = stack.make_supervisor(
        values, on_line=lambda name, line: lines.append(f"{name}: {line}")
    )
    with supervisor:
        supervisor.wait_healthy(timeout=600)
        soak = Soak(supervisor, arguments, given)
        uvloop.run(soak.run())
    soak.note_after_stop()
    soak.write(arguments.output.with_suffix(".json"))
    draw(soak.report, arguments.output.with_suffix(".png"))
    if lines:
        print("what the services logged last:", *list(lines)[-10:], sep="\n  ")
    return verdict(soak.report)


class Soak:
    """One run: load, samples, verdict."""

    def __init__(
        self, supervisor: Supervisor, arguments: argparse.Namespace, given: dict[str, Any]
    ) -> None:
        self._supervisor = supervisor
        self._arguments = arguments
        self._load = Load(
            supervisor.urls["http"], arguments.clients, arguments.pause, arguments.seed
        )
        self._segments_before = segments()
        self.report: dict[str, Any] = {
            "machine": {
                "cpu": _cpu_name(),
                "cores": os.cpu_count(),
                "kernel": platform.release(),
                "python": platform.python_version(),
                "nice": os.nice(0),
                "load_average": os.getloadavg(),
            },
            "commit": _commit(),
            "minutes": arguments.minutes,
            "clients": arguments.clients,
            "pause": arguments.pause,
            "serve_flags": given,
            "samples": [],
        }

    async def run(self) -> None:
        """Loads the stack and samples it until the time is over, then once more when it idles."""
        output = self._arguments.output.with_suffix(".json")
        output.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        end = start + 60 * self._arguments.minutes
        clients = asyncio.create_task(self._load.run())
        try:
            while (now := time.monotonic()) < end and not clients.done():
                await asyncio.sleep(min(self._arguments.interval, end - now))
                sample = await asyncio.to_thread(self._sample)
                self.report["samples"].append({"seconds": time.monotonic() - start, **sample})
                await asyncio.to_thread(self.write, output)
        finally:
            self._load.stop()
            await clients
        # What was cancelled last needs steps to go, and a draft may be tested now that nothing runs.
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            await asyncio.sleep(3)
            self.report["idle"] = await asyncio.to_thread(self._sample)
            engine = self.report["idle"]["engine"]
            if not any(engine[name] for name in AT_REST) or time.monotonic() > deadline:
                return

    def _sample(self) -> dict[str, Any]:
        processes = {}
        for state in self._supervisor.states():
            if state.pid is not None:
                processes[state.name] = process_sample(state.pid)
                processes[state.name]["restarts"] = state.num_restarts
        processes["client"] = process_sample(os.getpid())
        told = scrape(self._supervisor.urls["verify_metrics"])
        return {
            "processes": processes,
            "engine": told,
            "segments": len(segments() - self._segments_before),
            "requests": self._load.num_done,
            "load_average": os.getloadavg()[0],
        }

    def note_after_stop(self) -> None:
        """What the stack left when it ended."""
        self.report["left_segments"] = sorted(segments() - self._segments_before)
        self.report["left_directory"] = self._supervisor.directory.exists()  # type: ignore[attr-defined]

    def write(self, path: Path) -> None:
        """Writes the report."""
        self.report["outcomes"] = dict(sorted(self._load.outcomes.items()))
        self.report["unexpected"] = self._load.unexpected[:50]
        self.report["growth"] = growth(self.report["samples"], self._arguments.warm_up)
        path.write_text(json.dumps(self.report, indent=1) + "\n")


def verdict(report: dict[str, Any]) -> int:
    """Prints tables and what is wrong; 0 if nothing is."""
    print(f"\n{sum(report['outcomes'].values())} requests in {report['minutes']:g} minutes:")
    for name, count in report["outcomes"].items():
        print(f"  {count:7d}  {name}")
    print(f"\n{'':26s}{'after warm-up':>14s}{'at the end':>14s}{'per hour':>12s}")
    for row in report["growth"]:
        mark = "  GREW" if row["grew"] else ""
        print(
            f"{row['what']:26s}{row['first']:14.1f}{row['last']:14.1f}{row['per_hour']:+12.2f}{mark}"
        )
    problems = [f"{row['what']} grew" for row in report["growth"] if row["grew"]]
    problems += [f"unexpected: {text}" for text in report["unexpected"][:5]]
    idle = report.get("idle", {}).get("engine", {})
    for name in AT_REST:
        if idle.get(name, 1):
            problems.append(f"{name} is {idle.get(name)} when nothing runs")
    problems += [f"left behind: {name}" for name in report["left_segments"]]
    if report["left_directory"]:
        problems.append("the directory of the sockets was left behind")
    if not report["growth"]:
        problems.append("too short: no sample lies behind the warm-up")
    print("\n" + ("\n".join(problems) if problems else "Nothing grew, nothing was left."))
    return 1 if problems else 0


def process_sample(pid: int) -> dict[str, float]:
    """Memory in MiB, descriptors, threads and CPU seconds of a process and its children."""
    total: dict[str, float] = collections.Counter()
    try:
        root = psutil.Process(pid)
        # The client's children are the services.
        family = [root] if pid == os.getpid() else [root, *root.children(recursive=True)]
        for process in family:
            with process.oneshot():
                memory = process.memory_full_info()
                total["rss_mib"] += memory.rss / MIB
                total["pss_mib"] += memory.pss / MIB
                total["private_mib"] += memory.uss / MIB
                total["descriptors"] += process.num_fds()
                total["threads"] += process.num_threads()
                total["cpu_seconds"] += sum(process.cpu_times()[:2])
                total["processes"] += 1
    except psutil.NoSuchProcess:
        pass
    return dict(total)


def segments() -> set[str]:
    """Names of the shared-memory segments of this software."""
    return {path.name for path in Path("/dev/shm").glob("foredraft*")}


def scrape(url: str) -> dict[str, float]:
    """The engine's own figures."""
    with urllib.request.urlopen(url, timeout=60) as response:
        lines = response.read().decode().splitlines()
    told: dict[str, float] = {}
    for line in lines:
        name = line.partition("{")[0].partition(" ")[0]
        if name in METRICS:
            told[METRICS[name]] = told.get(METRICS[name], 0.0) + float(line.rpartition(" ")[2])
    # Cached pages fill the pool and stay; both together must not.
    told["kv_pages_held"] = told.get("kv_pages_used", 0) + told.get("kv_pages_cached", 0)
    return told


@dataclass(frozen=True)
class Series:
    """A quantity over time."""

    what: str
    kind: str  # key of TOLERANCES
    seconds: list[float]
    values: list[float]


def all_series(samples: Sequence[dict[str, Any]]) -> list[Series]:
    """Everything that must not grow."""
    found = []
    times = [sample["seconds"] for sample in samples]
    names = sorted({name for sample in samples for name in sample["processes"]})
    for name in names:
        # PSS is not judged: it moves with what else on the machine maps the same libraries.
        for kind in ("rss_mib", "private_mib", "descriptors", "threads"):
            values = [sample["processes"].get(name, {}).get(kind) for sample in samples]
            known = [(t, v) for t, v in zip(times, values, strict=True) if v is not None]
            found.append(
                Series(f"{name} {kind}", kind, [t for t, _ in known], [v for _, v in known])
            )
    held = [sample["engine"]["kv_pages_held"] for sample in samples]
    found.append(Series("KV pages held", "kv_pages_held", times, held))
    count = [float(sample["segments"]) for sample in samples]
    found.append(Series("shared-memory segments", "segments", times, count))
    return found


def growth(samples: Sequence[dict[str, Any]], warm_up: float) -> list[dict[str, Any]]:
    """Compares the medians of the quarters of the time behind the warm-up, and gives the robust slope.

    What grows without end is higher in the last quarter than in the first, by more than the tolerance, and than in the
    third, by more than a third of it: a steady leak is both or neither. What fills and then stays, as an allocator's
    high-water mark does, is only the first.

    The slope is the median of slopes between all pairs of (at most 200) samples (Theil and Sen), which single peaks do
    not move.
    """
    if len(samples) < 10:
        return []
    begin = warm_up * samples[-1]["seconds"]
    rows = []
    for series in all_series(samples):
        points = [(t, v) for t, v in zip(series.seconds, series.values, strict=True) if t >= begin]
        if len(points) < 8:
            continue
        size = len(points) // 4
        first, _, third, last = (
            statistics.median(v for _, v in points[i * size : (i + 1) * size]) for i in range(4)
        )
        thin = points[:: max(1, len(points) // 200)]
        slopes = [
            (v2 - v1) / (t2 - t1)
            for i, (t1, v1) in enumerate(thin)
            for t2, v2 in thin[i + 1 :]
            if t2 > t1
        ]
        part, absolute = TOLERANCES[series.kind]
        allowed = max(part * first, absolute)
        rows.append(
            {
                "what": series.what,
                "first": first,
                "last": last,
                "highest": max(v for _, v in points),
                "per_hour": 3600 * statistics.median(slopes),
                "grew": last - first > allowed and last - third > allowed / 3,
            }
        )
    return rows


def draw(report: dict[str, Any], path: Path) -> None:
    """Plots every process's memory, descriptors and threads, the KV pages and the requests."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    samples = report["samples"]
    if not samples:
        return
    minutes = [sample["seconds"] / 60 for sample in samples]
    figure, grid = plt.subplots(2, 3, figsize=(12, 5.2))
    names = [
        name for name in ("gateway", "verify", "draft", "client") if name in samples[0]["processes"]
    ]
    kinds = (("rss_mib", "resident memory [MiB]"), ("private_mib", "private memory [MiB]"))
    kinds += (("descriptors", "open descriptors"), ("threads", "threads"))
    for axes, (kind, title) in zip(grid.flat, kinds, strict=False):
        for name in names:
            values = [
                sample["processes"].get(name, {}).get(kind, float("nan")) for sample in samples
            ]
            axes.plot(minutes, values, label=name, linewidth=1.1)
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7, loc="center right")
    pages = grid.flat[4]
    for key, label in (
        ("kv_pages_held", "held or cached"),
        ("kv_pages_used", "held"),
        ("kv_pages", "in the pool"),
    ):
        pages.plot(
            minutes, [sample["engine"][key] for sample in samples], label=label, linewidth=1.1
        )
    pages.plot(
        minutes, [sample["segments"] for sample in samples], label="shared segments", linewidth=1.1
    )
    pages.set_title("KV pages, shared-memory segments", fontsize=9)
    pages.legend(fontsize=7, loc="center right")
    done = grid.flat[5]
    done.plot(minutes, [sample["requests"] for sample in samples], linewidth=1.1)
    done.set_title("requests answered", fontsize=9)
    for axes in grid.flat:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=7)
        axes.set_xlabel("minutes", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    ran = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return ran.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
