"""What fills the card: weights, KV, graphs and the rest, with an engine and its draft at a given share of the memory.

    python -m benchmarks.gpu.capacity --modes none chain tree --mem-fraction-static 0.85

8B shape with random weights in bfloat16 and an EAGLE-3 head, as in `benchmarks.gpu.decode`.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.shapes import MODES, flags_of, write_checkpoints
from foredraft.config.services import KV_CACHE_DTYPES
from tests.support.engines import running_engine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", default=["none", "chain"], choices=list(MODES))
    parser.add_argument("--mem-fraction-static", type=float, default=0.85)
    parser.add_argument("--batch", type=int, default=32, help="--max-running-requests")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES)
    parser.add_argument("--layers", type=int, default=32, help="fewer for debugging")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target, head = write_checkpoints(Path(folder), args.layers)
        # A process keeps what it has once taken of the card, so each mode has one of its own.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
            jobs = [pool.submit(_measure, mode, target, head, args) for mode in args.modes]
            rows = [job.result() for job in jobs]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_capacity.json").write_text(json.dumps(rows, indent=1))
    names = list(rows[0])
    print("MiB, but for tokens")
    for name in names:
        print(f"{name:26}" + "".join(f"{row[name]:>12}" for row in rows))
    return 0


def _measure(mode: str, target: Path, head: Path, args: argparse.Namespace) -> dict[str, Any]:
    algorithm, flags = flags_of(mode, head, args.batch, 1024)
    del flags["max_total_tokens"]
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    before = total - free
    flags["mem_fraction_static"] = args.mem_fraction_static
    flags["kv_cache_dtype"] = args.kv_cache_dtype
    with running_engine(target, algorithm, **flags, max_total_tokens=None) as harness:
        engine = harness.engine
        runner = engine._target._runner
        free, total = torch.cuda.mem_get_info()
        used = total - free
        weights = sum(w.numel() * w.element_size() for w in set(runner.model.parameters()))
        kv = runner.kv.data.numel() * runner.kv.data.element_size()
        tokens = engine.limits.num_pages * engine.limits.page_size
        draft_weights = draft_kv = 0
        drafting = engine._drafting
        if drafting is not None:
            info = drafting._client.info
            assert info is not None
            draft_weights = info.weight_bytes
            draft_kv = info.kv_bytes_per_token * tokens
        rest = used - weights - kv - draft_weights - draft_kv
    return {
        "mode": mode,
        "card": total >> 20,
        "in use before": before >> 20,
        "in use": used >> 20,
        "share in use": f"{used / total:.3f}",
        "tokens of KV": tokens,
        "target: weights": weights >> 20,
        "target: KV": kv >> 20,
        "draft: weights": draft_weights >> 20,
        "draft: KV": draft_kv >> 20,
        "graphs, buffers, contexts": rest >> 20,
    }


if __name__ == "__main__":
    sys.exit(main())
