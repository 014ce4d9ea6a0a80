"""Measures the cost of two processes: ms per step with the draft in a process of its own, over that
with the draft in the verifier's process.

    python -m benchmarks.gpu.split --modes chain --batch 1 8 32

8B shape, random weights, SIMULATED acceptance, as in `benchmarks.gpu.decode`; with MPS and without.
The draft in the verifier's process is a harness of this benchmark: the same service behind the same
socket, with a stream of its own, on the verifier's memory instead of mappings of it.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.runs import run_batch, watched_waits
from benchmarks.gpu.shapes import MODES, flags_of, write_checkpoints
from benchmarks.results_folder import results_folder
from draft_service.drafters import create_drafter
from draft_service.service import SERVICE_NAME, DraftService
from foredraft.api.draft.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from foredraft.cli import mps
from foredraft.config.options import parse
from foredraft.config.services import DraftConfig
from foredraft.rpc.server import RpcServer
from foredraft.transport import cuda
from testing import engines
from testing.drafts import DraftProcess
from testing.engines import running_engine

SETTINGS = ("one process", "two, MPS", "two, no MPS")


class OwnMemory:
    """Stands for `cuda.Mapping`: a process cannot map its own allocations."""

    bases: dict[bytes, int] = {}  # noqa: RUF012

    def __init__(self, handle: bytes, num_bytes: int, device: torch.device) -> None:
        self.device = device
        self.pointer = self.bases[handle]
        self.bytes = cuda.view(self.pointer, num_bytes, device)

    def close(self) -> None:
        """Does nothing: nothing was mapped."""


class OwnDraft(DraftProcess):
    """The draft service in a thread of this process."""

    def start(self, ready: bool = True) -> None:
        """See DraftProcess."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self.wait_ready()

    def kill(self) -> None:
        """See DraftProcess."""
        self._stop.set()
        self._thread.join(20)

    async def _serve(self) -> None:
        flags = ["--listen", self.target, *self.flags]
        config = parse(DraftConfig, flags, "draft", "")
        stream = torch.cuda.Stream()
        torch.cuda.set_stream(stream)
        with ThreadPoolExecutor(1, initializer=lambda: torch.cuda.set_stream(stream)) as worker:
            server = RpcServer(self.target)
            service = DraftService(worker)
            server.add(add_DraftServiceServicer_to_server, service, SERVICE_NAME)
            await server.start()
            loop = asyncio.get_running_loop()
            service.open(await loop.run_in_executor(worker, create_drafter, config))
            await server.set_serving()
            while not self._stop.is_set():
                await asyncio.sleep(0.05)
            await server.stop(0)
            await service.wait_closed(5)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", default=["chain"], choices=["chain", "tree"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=512)
    parser.add_argument("--layers", type=int, default=32, help="fewer for debugging")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu()
    if len(args.settings) > 1:
        # Whether a process is a client of MPS is settled when it opens the card, so each setting
        # has its own.
        return _run_all(args)
    (setting,) = args.settings
    with tempfile.TemporaryDirectory() as folder, mps.running("no MPS" not in setting) as variables:
        os.environ.update(variables)
        target, head = write_checkpoints(Path(folder), args.layers)
        if setting == "one process":
            _share_this_process()
        for mode in args.modes:
            for row in _measure(setting, mode, target, head, args):
                print("ROW", json.dumps(row), flush=True)
        for name in variables:
            del os.environ[name]
    return 0


def _run_all(args: argparse.Namespace) -> int:
    import subprocess

    rows = []
    for setting in args.settings:
        command = [sys.executable, "-m", "benchmarks.gpu.split", "--settings", setting]
        command += ["--modes", *args.modes, "--batch", *map(str, args.batch)]
        command += ["--prompt", str(args.prompt), "--output", str(args.output)]
        command += ["--layers", str(args.layers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        rows += [json.loads(line[4:]) for line in done.stdout.splitlines() if line[:4] == "ROW "]
    (args.out / "gpu_split.json").write_text(json.dumps(rows, indent=1))
    alone = {(r["mode"], r["batch"]): r for r in rows if r["setting"] == "one process"}
    print("ms a step; acceptance is SIMULATED")
    print(f"{'mode':6} {'batch':>5} {'setting':12} {'p50':>7} {'p99':>7} {'p50 over one':>13}")
    for row in rows:
        one = alone.get((row["mode"], row["batch"]))
        over = f"{row['p50'] - one['p50']:13.3f}" if one else f"{'-':>13}"
        print(
            f"{row['mode']:6} {row['batch']:5} {row['setting']:12} {row['p50']:7.3f} "
            f"{row['p99']:7.3f} {over}"
        )
    return 0


def _share_this_process() -> None:
    handle_of = cuda.handle_of

    def remembered(pointer: int) -> bytes:
        handle = handle_of(pointer)
        OwnMemory.bases[handle] = cuda.allocation_of(pointer)[0]
        return handle

    cuda.handle_of = remembered
    cuda.Mapping = OwnMemory  # type: ignore[assignment,misc]
    engines.DraftProcess = OwnDraft  # type: ignore[misc]


def _measure(
    setting: str, mode: str, target: Path, head: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    algorithm, flags = flags_of(mode, head, max(args.batch), args.prompt + args.output)
    rows = []
    with (
        watched_waits() as waits,
        running_engine(target, algorithm, **flags, require_transport="cuda_ipc") as harness,
    ):
        for batch in args.batch:
            run_batch(harness, batch, args.prompt, 48)
            waits.clear()
            run_batch(harness, batch, args.prompt, args.output)
            ends = [end for _, end in waits]
            steps = np.diff(ends[5:-5]) * 1e3
            p50, p99 = np.percentile(steps, [50, 99])
            rows.append(
                {
                    "setting": setting,
                    "mode": mode,
                    "batch": batch,
                    "p50": float(p50),
                    "p99": float(p99),
                    "steps": len(steps),
                    "accept": MODES[mode][3],
                }
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
