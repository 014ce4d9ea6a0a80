"""Does anything grow?

Mixed load on a real stack for a long time, while memory, descriptors, threads, KV pages and
shared-memory segments of every process are watched.

    python -m benchmarks.soak --minutes 60 --output benchmarks/results/soak
    python -m benchmarks.soak --minutes 45 --output /tmp/soak -- --speculative-algorithm EAGLE3 \\
        --speculative-draft-model-path foredraft-demo-eagle3

What follows `--` are flags of `foredraft serve`. Writes OUTPUT.json (again and again while it runs)
and OUTPUT.png, and ends with 1 if something grew, was left behind, or was answered otherwise than
it had to be.
"""

import argparse
import asyncio
import collections
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.results_folder import results_folder
from benchmarks.soak_load import KEYS, Load
from foredraft.cli import serve, serve_config, stack
from foredraft.cli.supervisor import Supervisor
from testing.soak_growth import draw, growth

MIB = 2**20
# A bounded trie and a small pool, so that both are full when the warm-up ends.
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
    try:
        results_folder(str(arguments.output.parent))
    except argparse.ArgumentTypeError as error:
        parser.error(f"--output: {error}")
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
        return _soak(serve_config.resolve_models(values), arguments, given)


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
    """Runs a soak: load, samples, verdict."""

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
        # What was cancelled last needs steps to go, and a draft may be tested now that nothing
        # runs.
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
        """Records what the stack left behind after its end."""
        # The stack's processes have ended: what a living one holds is another program's.
        self.report["left_segments"] = sorted(
            name for name in segments() - self._segments_before if not is_held(name)
        )
        self.report["left_directory"] = self._supervisor.directory.exists()  # type: ignore[attr-defined]

    def write(self, path: Path) -> None:
        """Writes the report."""
        self.report["outcomes"] = dict(sorted(self._load.outcomes.items()))
        self.report["unexpected"] = self._load.unexpected[:50]
        self.report["growth"] = growth(self.report["samples"], self._arguments.warm_up)
        path.write_text(json.dumps(self.report, indent=1) + "\n")


def verdict(report: dict[str, Any]) -> int:
    """Prints tables and problems; returns 0 without problems."""
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
    """Returns memory in MiB, descriptors, threads and CPU seconds of a process and its children."""
    total: collections.defaultdict[str, float] = collections.defaultdict(float)
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
    """Returns the names of this software's shared-memory segments."""
    return {path.name for path in Path("/dev/shm").glob("foredraft*")}


def is_held(segment: str) -> bool:
    """Returns whether the process that made a segment lives, by the number in its name."""
    return psutil.pid_exists(int(segment.split("-")[1]))


def scrape(url: str) -> dict[str, float]:
    """Returns the engine's own figures."""
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
