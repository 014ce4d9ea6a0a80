"""Measures the cost of `--exactness strict` over `off`: captured steps of the target at the shape
of Llama-3.1-8B, and forwards of prompts.

    python -m benchmarks.gpu.exactness --batch 1 8 32 128 --context 600

Random weights; one model, with the products and attention of either. A step is all of a
captured decode step: the forward over sequences of so many keys, the rule, the walk, accepted KV in
place. Trees are of 8 rows in branches of four; a chain has 4 rows. Both levels are prepared first
and replayed in turns, since a hot card is slower. Times are medians of replays in milliseconds.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.needed import need_gpu
from benchmarks.gpu.shapes import write_checkpoints
from benchmarks.results_folder import results_folder
from foredraft.attention.choice import exact_attention_for, target_attention_for
from foredraft.kernel_launch import times_on_gpu
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.linear import CudaMethod, Linear
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows, StepRows
from foredraft.runner.model_runner import ModelRunner
from verify_service.exactness import OFF, STRICT, make_exact
from verify_service.executor.captured.graphs import DecodeGraphs
from verify_service.executor.captured.mixed import MixedGraphs, mixed_sizes
from verify_service.executor.captured.step import DecodeStep, StepKind, StepSizes

PAGE_SIZE = 16
REPEATS = 11
LEVELS = (OFF, STRICT)
# Parents of the rows, the root's first: see `trees.walk_trees`.
ROWS = {
    "plain": [-1],
    "chain": [-1, 0, 1, 2],
    "tree": [-1, 0, 0, 0, 0, 1, 2, 5],
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--context", nargs="+", type=int, default=[600])
    parser.add_argument("--kinds", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--prompts", nargs="*", type=int, default=[512, 2048, 8192])
    parser.add_argument("--layers", type=int, default=32, help="fewer for debugging")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu()
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        target, _ = write_checkpoints(Path(folder), args.layers)
        model = load_model(target, dtype=torch.bfloat16, device=device, load_format="dummy")
    rows = []
    for batch in args.batch:
        for context in args.context:
            for kind in args.kinds:
                row: dict[str, Any] = {"kind": kind, "batch": batch, "context": context}
                row |= _both(
                    model, lambda level, b=batch, c=context, k=kind: _step(model, level, b, c, k)
                )
                rows.append(_shown(row))
    for tokens in args.prompts:
        row = {"kind": "prompt", "batch": 1, "context": tokens}
        row |= _both(model, lambda level, n=tokens: _prompt(model, level, n))
        rows.append(_shown(row))
    (args.out / "gpu_exactness.json").write_text(json.dumps(rows, indent=1))
    return 0


def _both(model: DecoderModel, prepare: Callable[[str], Callable[[], object]]) -> dict[str, float]:
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    methods, runs, times = {}, {}, {level: [] for level in LEVELS}
    with torch.inference_mode():
        for level in LEVELS:
            if level == STRICT:
                make_exact(model, STRICT)
            else:
                for linear in linears:
                    linear.method = CudaMethod()
            methods[level] = [linear.method for linear in linears]
            runs[level] = prepare(level)
            runs[level]()
        for _ in range(REPEATS):
            for level in LEVELS:
                for linear, method in zip(linears, methods[level], strict=True):
                    linear.method = method
                times[level] += times_on_gpu(runs[level], 1)
    return {level: sorted(found)[REPEATS // 2] for level, found in times.items()}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    row["price"] = row[STRICT] / row[OFF] - 1
    print(
        f"{row['kind']:6} batch {row['batch']:3} context {row['context']:5}: off {row[OFF]:8.3f}"
        f" ms, strict {row[STRICT]:8.3f} ms, price {100 * row['price']:+5.1f} %",
        flush=True,
    )
    return row


def _cache(model: DecoderModel, num_tokens: int) -> PagedKV:
    device, pages = model.device, -(-num_tokens // PAGE_SIZE)
    kv = PagedKV.for_model(model.config, pages, PAGE_SIZE, torch.bfloat16, device, 1)
    kv.data.normal_()
    return kv


def _attention(model: DecoderModel, level: str) -> Any:
    return (exact_attention_for if level == STRICT else target_attention_for)(model.device)


def step_ms(model: DecoderModel, level: str, batch: int, context: int, kind: str) -> float:
    """Returns the milliseconds of a captured decode step.

    Args:
        level: Exactness of attention; the model's products have theirs.
        context: Number of keys of each sequence.
        kind: Key of `ROWS`.
    """
    return _median(_step(model, level, batch, context, kind))


def prompt_ms(model: DecoderModel, level: str, num_tokens: int) -> float:
    """Returns the milliseconds of a forward of one prompt."""
    return _median(_prompt(model, level, num_tokens))


def _step(
    model: DecoderModel, level: str, batch: int, context: int, kind: str
) -> Callable[[], object]:
    parents = ROWS[kind]
    each = -(-(context + 2 * len(parents)) // PAGE_SIZE)
    kv = _cache(model, batch * each * PAGE_SIZE)
    step = DecodeStep(
        model,
        kv,
        _attention(model, level),
        StepSizes(
            max_batch=batch,
            max_rows=len(parents),
            max_path=4,
            max_tokens=model.config.max_position_embeddings,
            num_slots=batch,
            has_branches=kind == "tree" or level == OFF,
        ),
    )
    pages = torch.randperm(batch * each, device=kv.data.device).view(batch, each)
    step.tables[:batch, :each] = pages.int()
    graphs = DecodeGraphs(step)
    step_kind = StepKind(batch, len(parents), ())

    def run() -> None:
        records = graphs.buffers.next_records(batch)
        records["slot"] = range(batch)
        records["committed"], records["num_rows"], records["tree"] = context, len(parents), -1
        records["entry"] = records["new_page"] = records["forced"] = records["mask"] = 0
        records["tokens"] = 17
        records["parents"] = parents
        graphs.buffers.upload(batch)
        graphs.start(step_kind, batch).chosen()

    run()
    return lambda: [graph.replay() for graph, _ in filter(None, graphs._steps.values())]


def _prompt(model: DecoderModel, level: str, num_tokens: int) -> Callable[[], object]:
    kv = _cache(model, num_tokens)
    attention = _attention(model, level)
    pages = list(range(-(-num_tokens // PAGE_SIZE)))
    if num_tokens > mixed_sizes(model, num_tokens)[-1]:
        runner = ModelRunner(model, kv, attention)
        rows = SequenceRows.chunk(pages, 0, [17] * num_tokens)
        return lambda: runner.forward([rows], all_hidden=False)
    tables = torch.tensor([pages, pages], dtype=torch.int32, device=kv.data.device)
    graphs = MixedGraphs(model, kv, attention, tables=tables, max_tree=1, max_rows=num_tokens)
    chunk = StepRows(0, 0, [17] * num_tokens, None, "last")
    graphs.forward([chunk], ())
    return lambda: [graph.replay() for graph in filter(None, graphs._graphs.values())]


def _median(run: Callable[[], object]) -> float:
    run()
    return sorted(times_on_gpu(run, REPEATS))[REPEATS // 2]


if __name__ == "__main__":
    sys.exit(main())
