"""Measures the GPU memory of an engine and its draft at a given share of the card, and the tokens
of KV that fit.

    python -m benchmarks.gpu.capacity --modes none chain tree --batch 512

8B shape with random weights in bfloat16 and an EAGLE-3 head, as in `benchmarks.gpu.decode`. Needs
the card alone: what others hold is counted as the verifier's context.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.shapes import MODES, flags_of, write_checkpoints
from benchmarks.results_folder import results_folder
from foredraft.config.options import to_flags
from foredraft.config.services import KV_CACHE_DTYPES
from foredraft.telemetry import logging as telemetry_logging
from testing.drafts import DraftProcess
from testing.engines import CHANGED, DRAFT_FLAGS, Harness, running_engine
from verify_service.drafts.remote_draft import RemoteDraft


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", default=["none", "chain"], choices=list(MODES))
    parser.add_argument("--mem-fraction-static", type=float, default=0.85)
    parser.add_argument("--batch", type=int, default=32, help="--max-running-requests")
    parser.add_argument(
        "--cuda-graph-max-bs", type=int, help="capturing each of 170 shapes takes a while"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES)
    parser.add_argument("--layers", type=int, default=32, help="fewer for debugging")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        target, head = write_checkpoints(Path(folder), args.layers)
        # A process keeps memory that it has once taken, so each mode has a process of its own.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
            for mode in args.modes:
                started = time.monotonic()
                rows.append(pool.submit(_measure, mode, target, head, args).result())
                print(f"{mode}: {time.monotonic() - started:.0f} s", flush=True)
                (args.out / "gpu_capacity.json").write_text(json.dumps(rows, indent=1))
    _report(rows)
    return 0


def _measure(mode: str, target: Path, head: Path, args: argparse.Namespace) -> dict[str, Any]:
    telemetry_logging.setup("verify", "info", "text")
    algorithm, flags = flags_of(mode, head, args.batch, 1024)
    flags |= {
        "mem_fraction_static": args.mem_fraction_static,
        "kv_cache_dtype": args.kv_cache_dtype,
        "cuda_graph_max_bs": args.cuda_graph_max_bs,
        "max_total_tokens": None,
    }
    context, total = _in_use()
    with ExitStack() as stack:
        draft_loaded = 0
        if algorithm != "NONE":
            own = {"model_path": str(target), "speculative_algorithm": algorithm, **flags}
            known = {name: own[name] for name in own if name in {*DRAFT_FLAGS, *CHANGED}}
            draft = stack.enter_context(DraftProcess(*to_flags(known)))
            draft_loaded = _in_use()[0] - context
            flags["draft"] = (f"{algorithm}={draft.target}",)
        harness = stack.enter_context(running_engine(target, algorithm, **flags))
        parts = _parts(harness, context, draft_loaded)
        in_use = _in_use()[0]
        tokens = harness.engine.limits.num_pages * harness.engine.limits.page_size
    rest = in_use - sum(parts.values())
    return {
        "mode": mode,
        "tokens of KV": tokens,
        "share of the card in use": round(in_use / total, 4),
        "bytes": {
            "card": total,
            "in use": in_use,
            **parts,
            "verifier: kernels and graphs outside torch; draft: graphs, buffers": rest,
        },
    }


def _in_use() -> tuple[int, int]:
    """Returns the bytes in use on the card, and all of its bytes."""
    free, total = torch.cuda.mem_get_info()
    return total - free, total


def _parts(harness: Harness, context: int, draft_loaded: int) -> dict[str, int]:
    """Returns the bytes of distinguishable parts; `draft_loaded` is a draft's memory before its
    attach.
    """
    engine = harness.engine
    runner = engine._executor._runner  # type: ignore[attr-defined]
    weights = sum(w.numel() * w.element_size() for w in set(runner.model.parameters()))
    kv = runner.kv.data.numel() * runner.kv.data.element_size()
    graphs = sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )
    draft_weights = draft_kv = 0
    for draft in engine._drafts.each:
        assert isinstance(draft, RemoteDraft)
        info = draft._client.info
        assert info is not None
        draft_weights = info.weight_bytes
        draft_kv = info.kv_bytes_per_token * engine.limits.num_pages * engine.limits.page_size
    return {
        "target: weights": weights,
        "target: KV": kv,
        "draft: weights": draft_weights,
        "draft: KV": draft_kv,
        "verifier: memory of its graphs": graphs,
        "verifier: buffers, and room for steps with prompts": torch.cuda.memory_reserved()
        - weights
        - kv
        - graphs,
        "verifier: CUDA context": context,
        "draft: CUDA context and kernels": draft_loaded - draft_weights,
    }


def _report(rows: list[dict[str, Any]]) -> None:
    print(f"{'MiB':70}" + "".join(f"{row['mode']:>10}" for row in rows))
    for name in rows[0]["bytes"]:
        print(f"{name:70}" + "".join(f"{row['bytes'][name] >> 20:>10}" for row in rows))
    for name in ("share of the card in use", "tokens of KV"):
        print(f"{name:70}" + "".join(f"{row[name]:>10}" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
