"""A draft that is killed, stands still or faults at each point between the two words that order it
and its verifier on one GPU.

    python -m benchmarks.gpu.faults
    python -m benchmarks.gpu.faults --modes alone mps mps --seconds 90 --resume --cases "level 1:SIGKILL" "waiting:SIGSTOP"

The bundled model and its EAGLE-3 head in float32; 8 requests, greedy and sampled. For each case, a
line as soon as it is over: whether the draft came to that point, whether all texts are plain
decoding's, the longest time without a token (`--draft-step-timeout` is 1 s), seconds from the
draft's return until it was attached again, and blocks of GPU memory that the verifier keeps for
drafts (1: the one in use). A case that takes the verifier along, as faults under MPS do, is shown
as such; the next one has another. A mode that is named several times has as many processes, each
with an MPS daemon of its own.
"""  # noqa: E501

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.needed import need_gpu
from benchmarks.results_folder import results_folder
from foredraft.cli import mps
from foredraft.models.registry import resolve_model_path
from foredraft.rpc.lifetime import DEVICE_LOST
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from testing import engines
from testing.engines import Harness, Job, running_engine
from testing.fault_cases import BlockCount, FaultyDraft, do_fault
from testing.faulty_draft import ATTACHING, BY_VALUE, DEVICE, POINTS

CASES = [
    f"{point}:{action}"
    for action in ("SIGKILL", "SIGSTOP", "FAULT")
    for point in (DEVICE if action == "FAULT" else POINTS)
]
ON_HOST = (*ATTACHING, *BY_VALUE)  # points that exist without a GPU too
MODES = ("alone", "mps")
FLAGS = {
    "dtype": "float32",
    "max_total_tokens": 16384,
    "max_running_requests": 8,
    "draft_step_timeout": 1.0,
}
LONGEST_GAP = 1.5  # seconds: the step timeout, and some steps beside other processes
DRAFT = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
ON_GPU = {"device": "cuda", "require_transport": "cuda_ipc"}
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="POINT:ACTION")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--modes", nargs="+", default=["alone"], choices=MODES)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no case after so many")
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    parser.add_argument("--tokens", type=int, default=120, help="of each request")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--spares", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    need_gpu(args.device)
    if args.child:
        return _run_here(Path(args.child), args)
    chosen = args.cases or [
        case for case in CASES if args.device == "cuda" or case.split(":")[0] in ON_HOST
    ]
    results = Results(args.out / "gpu_faults.json", args)
    with ThreadPoolExecutor(len(args.modes)) as pool:
        runs = [
            pool.submit(_work_off, mode, todo, results, args)
            for mode, todo in _share_out(chosen, results, args.modes)
        ]
    for run in runs:
        run.result()
    return results.report([(mode, case) for mode in set(args.modes) for case in chosen])


class Results:
    """Results of the cases, kept in a file.

    Args:
        path: The file; its content stays if the run is resumed.
    """

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self._path, self._device = path, args.device
        self.until = time.monotonic() + args.seconds
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        if args.resume and path.exists():
            self._rows = json.loads(path.read_text())

    @property
    def known(self) -> set[tuple[str, str]]:
        """Returns modes and cases that were right."""
        return {(row["mode"], _case(row)) for row in self._rows if _is_right(row)}

    def add(self, mode: str, row: Row) -> None:
        """Prints a row and stores it."""
        with self._lock:
            row |= {"mode": mode, "device": self._device}
            self._rows = [
                one for one in self._rows if (one["mode"], _case(one)) != (mode, _case(row))
            ]
            self._rows.append(row)
            self._path.write_text(json.dumps(self._rows, indent=1))
            print(_line(row), flush=True)

    def report(self, asked: list[tuple[str, str]]) -> int:
        """Prints one line; returns 0 if every requested case was right."""
        wrong = [row for row in self._rows if not _is_right(row)]
        missing = sorted(set(asked) - self.known - {(row["mode"], _case(row)) for row in wrong})
        lost = sum("lost" in row for row in self._rows)
        gaps = [row.get("gap", 0.0) for row in self._rows if row["point"] not in ATTACHING]
        print(
            f"{'PASS' if not wrong and not missing else 'FAIL'}: {len(self.known)} right, {lost} of"
            " them took the verifier along; longest time without a token"
            f" {max(gaps, default=0.0):.2f} s; {len(wrong)} wrong; {len(missing)} not"
            f" run{': ' if missing else ''}"
            + ", ".join(f"{case} ({mode})" for mode, case in missing)
        )
        return 1 if wrong or missing else 0


def _share_out(
    chosen: list[str], results: Results, modes: list[str]
) -> list[tuple[str, "queue.SimpleQueue[str]"]]:
    """Returns each process's mode, and a queue of cases that all processes of a mode take from."""
    todo: dict[str, queue.SimpleQueue[str]] = {mode: queue.SimpleQueue() for mode in modes}
    known = results.known
    for mode, cases in todo.items():
        for case in chosen:
            if (mode, case) not in known:
                cases.put(case)
    return [(mode, todo[mode]) for mode in modes]


def _work_off(
    mode: str, todo: "queue.SimpleQueue[str]", results: Results, args: argparse.Namespace
) -> None:
    """Runs cases in processes of their own, since a broken CUDA context cannot be used again."""
    with tempfile.TemporaryDirectory() as folder, mps.running(mode == "mps") as variables:
        if mode == "mps" and not variables:
            raise SystemExit("there is no MPS here")
        environment = {**os.environ, **variables}
        following = _start(folder, mode, args, environment)
        while not todo.empty() and time.monotonic() < results.until:
            child, following = following, _start(folder, mode, args, environment)
            _use(child, mode, todo, results)
        following.kill()
        following.wait()


def _start(
    folder: str, mode: str, args: argparse.Namespace, environment: dict[str, str]
) -> "subprocess.Popen[str]":
    """Starts a process that imports everything before its first case, and does not touch the
    GPU.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.faults", "--child", folder]
    command += ["--tokens", str(args.tokens), "--device", args.device]
    command += ["--spares", "3" if mode == "alone" else "1"]  # most of MPS's would die with a case
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def _use(
    child: "subprocess.Popen[str]", mode: str, todo: "queue.SimpleQueue[str]", results: Results
) -> None:
    """Sends cases to a process, until one has ended it or the time is over."""
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        while time.monotonic() < results.until:
            try:
                case = todo.get_nowait()
            except queue.Empty:
                break
            child.stdin.write(case + "\n")
            child.stdin.flush()
            row = next((line for line in child.stdout if line.startswith("ROW ")), None)
            if row is None:
                print(f"{mode}: no verifier came up for {case}", flush=True)
                break
            found = json.loads(row[4:])
            results.add(mode, found)
            if "lost" in found:
                break


def _run_here(folder: Path, args: argparse.Namespace) -> int:
    """Runs the cases that come by stdin.

    The first process with a case makes the texts of plain decoding.
    """
    first = sys.stdin.readline()
    if not first:
        return 0
    FaultyDraft.num_spares = args.spares
    engines.new_draft = FaultyDraft  # type: ignore[assignment,misc]
    blocks = BlockCount()
    demo = resolve_model_path("foredraft-demo")
    work = _work(demo, args.tokens)
    flags = {**FLAGS, **(ON_GPU if args.device == "cuda" else {"device": "cpu"})}
    head = str(resolve_model_path("foredraft-demo-eagle3"))
    os.environ["FAULT_FILE"] = str(folder / "fault")
    texts = folder / "texts.json"
    if not texts.exists():
        with running_engine(demo, "NONE", **flags) as plain:
            texts.write_text(json.dumps([result.tokens for result in plain.run(work)]))
    expected = json.loads(texts.read_text())
    with running_engine(
        demo, "EAGLE3", **flags, **DRAFT, speculative_draft_model_path=head
    ) as harness:
        harness.run(work)
        case = first
        while case:
            point, action = case.strip().split(":")
            try:
                found = do_fault(harness, point, action, work, expected, blocks)
            except Exception as error:
                traceback.print_exc()
                _leave(harness, point, action, error)
            print("ROW", json.dumps(found.as_row()), flush=True)
            case = sys.stdin.readline()
    return 0


def _work(demo: Path, num_tokens: int) -> list[Job]:
    prompt = Tokenizer.from_dir(demo).encode(
        "def main():\n    parser = argparse.ArgumentParser()\n"
    )
    samplings = [
        SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=num_tokens, ignore_eos=True)
        for i in range(8)
    ]
    return [Job([*prompt, 40 + i], sampling) for i, sampling in enumerate(samplings)]


def _leave(harness: Harness, point: str, action: str, error: Exception) -> None:
    """Ends this process."""
    reason = repr(harness.engine.failure or error).splitlines()[0][:200]
    print("ROW", json.dumps({"point": point, "action": action, "lost": reason}), flush=True)
    assert harness.draft is not None
    harness.draft.__exit__(None, None, None)
    os._exit(3)


def _case(row: Row) -> str:
    return f"{row['point']}:{row['action']}"


def _is_right(row: Row) -> bool:
    """Returns whether a case went as it should.

    Under MPS, only work under way on the GPU may end the verifier too.
    """
    if "lost" in row:
        return row["mode"] == "mps" and row["action"] != "SIGSTOP" and row["point"] in DEVICE
    num_blocks = int(row["device"] == "cuda")
    ended = DEVICE_LOST if row["action"] == "FAULT" else None
    is_clean = row["blocks"] == num_blocks and row["status"] == ended
    # A CPU may take longer for the step itself.
    is_prompt = row["point"] in ATTACHING or row["device"] == "cpu" or row["gap"] < LONGEST_GAP
    return bool(row["happened"] and row["equal"] and is_clean and is_prompt)


def _line(row: Row) -> str:
    line = f"{row['mode']:5} {row['point']:14} {row['action']:7} "
    line += f"{'right' if _is_right(row) else 'WRONG'}: "
    if "lost" in row:
        return f"{line}the verifier went along: {row['lost'][:90]}"
    if not row["happened"]:
        return f"{line}the draft did not come to that point"
    texts = "texts equal" if row["equal"] else "texts differ"
    gap = "" if row["point"] in ATTACHING else f", {row['gap']:.2f} s without a token"
    status = "" if row["status"] is None else f", the draft ended with {row['status']}"
    return (
        f"{line}{texts}{gap}, attached again after {row['back']:.2f} s, {row['blocks']}"
        f" blocks{status}"
    )


if __name__ == "__main__":
    sys.exit(main())
