"""A draft that is killed, stands still or faults at each point between the two words that order it and its verifier on one GPU.

    python -m benchmarks.gpu.faults
    python -m benchmarks.gpu.faults --mps --cases "waiting:SIGSTOP" "level 1:SIGKILL" "level 1:FAULT"

The bundled model and its EAGLE-3 head in float32; 8 requests, greedy and sampled. For each case: whether the draft came to that
point, whether all texts are those of plain decoding, the longest time without a token (`--draft-step-timeout` is 1 s), seconds
from the draft's return until it was attached again, and blocks of GPU memory that the verifier keeps for drafts (1: the one in
use). A case that takes the verifier along, as faults under MPS do, is shown as such; the next one starts with another.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from foredraft.cli import mps
from foredraft.models.registry import resolve_model_path
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams
from tests.support import engines
from tests.support.engines import Harness, Job, running_engine
from tests.support.fault_cases import BlockCount, FaultyDraft, do_fault
from tests.support.faulty_draft import ATTACHING, BY_VALUE, DEVICE, POINTS

CASES = [
    f"{point}:{action}"
    for action in ("SIGKILL", "SIGSTOP", "FAULT")
    for point in (DEVICE if action == "FAULT" else POINTS)
]
ON_HOST = (*ATTACHING, *BY_VALUE)  # what there is without a GPU too
FLAGS = {
    "dtype": "float32",
    "max_total_tokens": 16384,
    "max_running_requests": 8,
    "draft_step_timeout": 1.0,
}
DRAFT = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
ON_GPU = {"device": "cuda", "require_transport": "cuda_ipc"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="POINT:ACTION")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--mps", action="store_true", help="run under a private MPS daemon")
    parser.add_argument("--tokens", type=int, default=120, help="of each request")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return _run_here(args.child, args)
    chosen = args.cases or [
        case for case in CASES if args.device == "cuda" or case.split(":")[0] in ON_HOST
    ]
    cases = [tuple(case.split(":")) for case in chosen]
    rows: list[dict[str, Any]] = []
    with mps.running(args.mps) as variables:
        while len(rows) < len(cases):
            rows += _run_child(cases[len(rows) :], args, variables)
    for row in rows:
        row |= {"mps": args.mps, "device": args.device}
    args.out.mkdir(parents=True, exist_ok=True)
    name = "gpu_faults_mps.json" if args.mps else "gpu_faults.json"
    (args.out / name).write_text(json.dumps(rows, indent=1))
    _report(rows)
    return 0 if all(map(_is_right, rows)) else 1


def _run_child(
    cases: list[tuple[str, ...]], args: argparse.Namespace, variables: dict[str, str]
) -> list[dict[str, Any]]:
    """What a process of its own found, up to the case that took it along."""
    command = [sys.executable, "-m", "benchmarks.gpu.faults", "--child", json.dumps(cases)]
    command += ["--tokens", str(args.tokens), "--device", args.device]
    rows = []
    environment = {**os.environ, **variables}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line[:4] == "ROW ":
                print(line[4:], end="", flush=True)
                rows.append(json.loads(line[4:]))
    if not rows:
        raise SystemExit(f"the verifier did not come up: exit status {child.returncode}")
    return rows


def _run_here(cases: list[tuple[str, ...]], args: argparse.Namespace) -> int:
    engines.DraftProcess = FaultyDraft  # type: ignore[assignment,misc]
    blocks = BlockCount()
    demo = resolve_model_path("foredraft-demo")
    work = _work(demo, args.tokens)
    flags = {**FLAGS, **(ON_GPU if args.device == "cuda" else {"device": "cpu"})}
    head = str(resolve_model_path("foredraft-demo-eagle3"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FAULT_FILE"] = str(Path(folder) / "fault")
        with running_engine(demo, "NONE", **flags) as plain:
            expected = [result.tokens for result in plain.run(work)]
        with running_engine(
            demo, "EAGLE3", **flags, **DRAFT, speculative_draft_model_path=head
        ) as harness:
            harness.run(work)
            for point, action in cases:
                try:
                    found = do_fault(harness, point, action, work, expected, blocks)
                except Exception as error:
                    traceback.print_exc()
                    _leave(harness, point, action, error)
                print("ROW", json.dumps(found.as_row()), flush=True)
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
    """Ends this process: what a broken context has left cannot be used."""
    reason = repr(harness.engine.failure or error).splitlines()[0][:200]
    print("ROW", json.dumps({"point": point, "action": action, "lost": reason}), flush=True)
    assert harness.draft is not None
    harness.draft.__exit__(None, None, None)
    os._exit(3)


def _is_right(row: dict[str, Any]) -> bool:
    if "lost" in row:
        return bool(row["mps"]) and row["action"] == "FAULT"
    num_blocks = int(row["device"] == "cuda")
    return bool(row["happened"] and row["equal"] and row["blocks"] == num_blocks)


def _report(rows: list[dict[str, Any]]) -> None:
    print(f"{'point':16} {'action':8} {'equal':>6} {'gap s':>6} {'back s':>7} {'blocks':>6}")
    for row in rows:
        print(f"{row['point']:16} {row['action']:8} ", end="")
        if "lost" in row:
            print(f"the verifier went along: {row['lost']}")
        elif not row["happened"]:
            print("did not come to that point")
        else:
            gap = f"{row['gap']:6.2f}" if row["point"] not in ATTACHING else f"{'-':>6}"
            print(f"{row['equal']!s:>6} {gap} {row['back']:7.2f} {row['blocks']:6}")


if __name__ == "__main__":
    sys.exit(main())
