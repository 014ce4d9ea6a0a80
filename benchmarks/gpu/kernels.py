"""Times the Triton kernels of a decode step on an NVIDIA GPU against torch's own operations and the
bytes they must move.

    python -m benchmarks.gpu.kernels --out kernels.json

Every figure is the median replay of a CUDA graph with one call per layer of a Llama-3.1-8B shape,
divided by the layers, so that launch gaps are as in a step and no layer finds its data in the cache
of the one before.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.needed import need_gpu
from foredraft.attention.base import Batch
from foredraft.attention.paged_triton import TritonAttention
from foredraft.attention.split_kv import Balance
from foredraft.attention.triton_plan import TritonPlan, splits_for
from foredraft.kernel_launch import times_on_gpu
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers import fused
from foredraft.layers.heads import Heads
from foredraft.sampling import sampling
from foredraft.sampling.rows import SamplingRows
from foredraft.sampling.triton_sampling import choose_tokens
from foredraft.types import SamplingParams
from verify_service.executor.kernels.trees import commit_paths, prepare_trees, walk_trees

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 32, 32, 8, 128, 4096, 14336, 128256
PAGE_SIZE = 16
BANDWIDTH = 4.49e12  # bytes per second, measured on one H200 by summing 8.6 GB


def microseconds(run: Callable[[int], Any], calls: int = LAYERS) -> float:
    """Returns the median time of one of `calls` calls, each given its number, replayed as one
    graph.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(call)
    return statistics.median(times_on_gpu(graph.replay, 15)[3:]) * 1e3 / calls


class Table:
    """Rows of results, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, ours: float, other: float | None, num_bytes: float) -> None:
        """Adds one kernel: microseconds of ours and of torch's, and the bytes that have to be
        moved.

        The last column is the share of the memory's speed that ours reaches.
        """
        floor = num_bytes / BANDWIDTH * 1e6
        self.rows.append({"kernel": name, "us": ours, "torch_us": other, "floor_us": floor})
        versus = "" if other is None else f"{other:9.2f}"
        print(f"{name:52} {ours:9.2f} {versus:>9} {floor:9.2f} {floor / ours:7.0%}", flush=True)


# Sequences, rows of each, keys before them.
SHORT = ((1, 1), (1, 4), (1, 32), (8, 1), (8, 4), (8, 32), (32, 1), (32, 4), (32, 32))
LONG = ((1, 1, 32768), (8, 1, 8192), (8, 32, 8192), (32, 1, 8192), (32, 4, 8192), (32, 32, 2048))
LONG_LAYERS = 4  # layers, whose keys are far more than a cache holds


def attention(table: Table) -> None:
    """Measures trees of R rows after a context, keys in 16 and in 8 bits."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for batch, rows in SHORT:
            _attention(table, batch, rows, 512, dtype, LAYERS)
        for batch, rows, context in LONG:
            _attention(table, batch, rows, context, dtype, LONG_LAYERS)


def _plan(
    contexts: Sequence[int], rows: int, dtype: torch.dtype, layers: int, longest: int = 32768
) -> TritonPlan:
    """Creates a plan of sequences with R rows after contexts of given lengths, on pages in any
    order. Keys are cut as in a step of such a batch.
    """
    batch = len(contexts)
    counts = [-(-(context + rows) // PAGE_SIZE) for context in contexts]
    kv = PagedKV(layers, sum(counts), PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype, "cuda", 1)
    for layer in kv.data:
        layer.copy_(torch.randn(layer.shape, dtype=torch.bfloat16, device="cuda"))
    ints = {"dtype": torch.int32, "device": "cuda"}
    pages = torch.zeros(batch, max(counts), **ints)
    for line, own in zip(pages, torch.randperm(sum(counts)).split(counts), strict=True):
        line[: len(own)] = own.int()
    starts = torch.tensor(contexts, **ints)
    positions = (starts[:, None] + torch.arange(rows, device="cuda")).flatten().long()
    mask = torch.ones(rows, rows, dtype=torch.uint8, device="cuda").tril().repeat(batch, 1)
    return TritonPlan(
        kv=kv,
        page_tables=pages,
        first_row=torch.arange(0, batch * rows, rows, **ints),
        num_rows=torch.full((batch,), rows, **ints),
        prefix_start=torch.zeros(batch, **ints),
        prefix_len=starts,
        write_index=starts,
        positions=positions,
        tail_mask=mask if rows > 1 else None,
        max_rows=rows,
        num_splits=splits_for(batch, rows, kv, longest),
    )


def _bytes(contexts: Sequence[int], rows: int, dtype: torch.dtype) -> int:
    """Returns the bytes of keys and values that one layer reads."""
    return 2 * sum(context + rows for context in contexts) * KV_HEADS * HEAD_DIM * dtype.itemsize


# Sequences, rows of each, keys before the longest and before each other one.
UNEVEN = (
    (8, 1, 6000, 430), (8, 4, 6000, 430), (8, 32, 6000, 430), (16, 4, 8192, 400), (16, 32, 8192, 400),
    (32, 1, 8192, 400), (32, 4, 8192, 400), (64, 1, 8192, 400), (64, 4, 8192, 400), (128, 1, 8192, 400),
)  # fmt: skip


def uneven(table: Table) -> None:
    """Measures contexts of equal and unequal lengths with the same total.

    Compares work lists made on the device with equal parts of each sequence.
    """
    print(f"{'us per layer':52} {'shared':>9} {'parts':>9} {'floor':>9} {'share':>7}")
    for batch, rows, longest, other in UNEVEN:
        total = longest + (batch - 1) * other
        spread = torch.empty(batch).exponential_(generator=torch.Generator().manual_seed(batch))
        for kind, contexts in (
            ("even", [total // batch] * batch),
            ("one long", [other] * (batch // 2) + [longest] + [other] * (batch - batch // 2 - 1)),
            ("spread", [1 + int(part) for part in spread / spread.sum() * total]),
        ):
            plan = _plan(contexts, rows, torch.bfloat16, LONG_LAYERS)
            name = f"{kind} B={batch} rows={rows} longest={max(contexts)} keys={sum(contexts)}"
            shared, parts = (
                _layers_time(dataclasses.replace(plan, balance=balance), LONG_LAYERS)
                for balance in (Balance(torch.bfloat16), None)
            )
            table.add(name, shared, parts, _bytes(contexts, rows, torch.bfloat16))


def _layers_time(plan: TritonPlan, layers: int) -> float:
    """Returns microseconds of attention in one layer."""
    num_tokens = len(plan.positions)
    queries = torch.randn(num_tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(num_tokens, HEADS * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    backend = TritonAttention()
    batch = Batch(plan.positions, plan.positions, plan.positions, (), plan=plan)
    backend.plan(batch, plan.kv, (None,), HEADS // KV_HEADS)

    def attend(layer: int) -> None:
        backend.attend(plan, queries, layer % layers, None, HEAD_DIM**-0.5, out)

    return microseconds(attend)


def _attention(
    table: Table, batch: int, rows: int, context: int, dtype: torch.dtype, layers: int
) -> None:
    """Measures one line. torch's column is SDPA in 16 bits with a mask over dense keys of the
    same layers.
    """
    plan = _plan([context] * batch, rows, dtype, layers)
    kv = plan.kv
    q = torch.randn(batch * rows, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(batch * rows, HEADS * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    backend = TritonAttention()
    group = HEADS // KV_HEADS

    def ours(layer: int) -> None:
        backend.attend(plan, q, layer, None, HEAD_DIM**-0.5, out)

    other = None
    if not kv.is_8_bit:
        dense = kv.data[..., : batch * (context + rows), :].view(
            layers, 2, KV_HEADS, batch, context + rows, HEAD_DIM
        )
        folded = q.view(batch, rows, KV_HEADS, group, HEAD_DIM).transpose(1, 2)
        folded = folded.reshape(batch, KV_HEADS, rows * group, HEAD_DIM)
        seen = torch.ones(rows, context + rows, dtype=torch.bool, device="cuda").tril(context)
        seen = seen.repeat_interleave(group, 0)

        def torchs(layer: int) -> None:
            k, v = dense[layer].transpose(1, 2)
            F.scaled_dot_product_attention(folded, k, v, attn_mask=seen)

        other = microseconds(torchs, layers)
    num_bytes = _bytes([context] * batch, rows, dtype)
    kind = "attention fp8" if kv.is_8_bit else "attention"
    name = f"{kind} B={batch} rows={rows} context={context} splits={plan.num_splits}"
    table.add(name, microseconds(ours, layers), other, num_bytes)


def element_wise(table: Table) -> None:
    """Measures norms, rotary with KV write and gated products, for some numbers of rows."""
    for rows in (1, 32, 1024):
        x = torch.randn(2, rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(HIDDEN, dtype=torch.bfloat16, device="cuda")
        both = torch.randn(rows, 2 * FFN, dtype=torch.bfloat16, device="cuda")
        heads = torch.randn(
            rows, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda"
        )
        kv = PagedKV(LAYERS, 80, PAGE_SIZE, KV_HEADS, HEAD_DIM, torch.bfloat16, "cuda")
        slots = torch.randperm(80 * PAGE_SIZE, device="cuda")[:rows]
        frequencies = torch.rand(HEAD_DIM // 2, device="cuda")
        angles = fused.angles(slots, frequencies, 1.0)

        def add_norm(_, x=x, weight=weight):
            fused.add_norm(x[0], x[1], weight, 1e-5, False)

        def torch_add_norm(_, x=x, weight=weight):
            F.rms_norm(x[0].add_(x[1]), (HIDDEN,), weight, 1e-5)

        def gated(_, both=both):
            fused.gated(both, "silu")

        def torch_gated(_, both=both):
            F.silu(both[:, :FFN]).mul_(both[:, FFN:])

        def rotate(layer, heads=heads, angles=angles, kv=kv, slots=slots):
            place = Heads(HEADS, angles, kv.keys(layer), kv.values(layer), slots)
            fused.rotate_and_store(heads, place, None)

        size = rows * HIDDEN * 2
        table.add(
            f"add + norm rows={rows}",
            microseconds(add_norm),
            microseconds(torch_add_norm),
            4 * size,
        )
        table.add(
            f"gated product rows={rows}", microseconds(gated), microseconds(torch_gated),
            rows * FFN * 6,
        )  # fmt: skip
        table.add(f"rotary + KV rows={rows}", microseconds(rotate), None, heads.numel() * 4)


def step(table: Table) -> None:
    """Measures the rule, the check, the walk and the move of KV, once per step."""
    for batch, rows in ((1, 1), (1, 32), (8, 4), (32, 1), (32, 32)):
        count = batch * rows
        logits = torch.randn(count, VOCAB, dtype=torch.bfloat16, device="cuda")
        for temperature in (0.0, 1.0):
            asked = [SamplingParams(temperature=temperature)] * count
            params = SamplingRows.from_params(asked, range(count), "cuda")

            def choose(_, logits=logits, params=params):
                choose_tokens(logits, params)

            def torchs(_, logits=logits, params=params):
                sampling.choose(logits.float(), params)

            other = microseconds(torchs, 2) if count <= 32 else None
            name = f"choose B={batch} rows={rows} temperature={temperature:g}"
            table.add(name, microseconds(choose, 4), other, logits.numel() * 2)
        # Of a trained model the best token has about a third of the mass; normal ones leave many to
        # top-p.
        places = torch.rand(count, VOCAB, device="cuda").argsort(-1) + 1
        falling, normal = (-1.5 * places.log()).bfloat16(), logits * 4
        del places
        for shape, kept, top_k, top_p in (
            ("falling", falling, 0, 0.9),
            ("falling", falling, 50, 1.0),
            ("falling", falling, 50, 0.95),
            ("normal", normal, 0, 0.9),
            ("normal", normal, 50, 0.95),
        ):
            filtered = [SamplingParams(top_k=top_k or -1, top_p=top_p)] * count
            asked = SamplingRows.from_params(filtered, range(count), "cuda")

            def choose_kept(_, kept=kept, asked=asked):
                choose_tokens(kept, asked)

            name = f"choose B={batch} rows={rows} {shape} top_k={top_k} top_p={top_p:g}"
            table.add(name, microseconds(choose_kept, 4), None, logits.numel() * 2)
        del falling, normal
        kv = PagedKV(LAYERS, batch * 8, PAGE_SIZE, KV_HEADS, HEAD_DIM, torch.bfloat16, "cuda", 1)
        tokens = torch.arange(rows, device="cuda").int().expand(batch, rows).contiguous()
        parents = (torch.arange(rows, device="cuda").int() - 2).clamp_min(-1)
        parents = torch.where(tokens[:1] == 0, -1, parents.clamp_min(0)).expand(batch, rows)
        parents = parents.contiguous()
        chosen = (tokens + 2).long()
        committed = torch.full((batch,), 64, dtype=torch.int32, device="cuda")
        sizes = torch.full((batch,), rows, dtype=torch.int32, device="cuda")
        tables = torch.arange(batch * 8, device="cuda").view(batch, 8).int()
        length = torch.full((batch,), min(rows, 5), dtype=torch.int32, device="cuda")
        path = (torch.arange(rows, device="cuda").int() * 2).clamp_max(rows - 1)
        path = path.expand(batch, rows).contiguous()

        def prepare(_, a=(tokens, parents, committed, sizes, tables, PAGE_SIZE, VOCAB, 0)):
            prepare_trees(*a)

        def walk(_, a=(chosen, tokens, parents)):
            walk_trees(*a)

        def commit(_, a=(kv, tables, committed, path, length)):
            commit_paths(*a)

        table.add(f"check and masks B={batch} rows={rows}", microseconds(prepare), None, 0)
        table.add(f"walk B={batch} rows={rows}", microseconds(walk), None, 0)
        moved = (min(rows, 5) - 1) * batch * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
        table.add(f"move KV B={batch} rows={rows}", microseconds(commit), None, moved)


PARTS = {"attention": attention, "uneven": uneven, "layers": element_wise, "step": step}


def main() -> None:
    """Runs all and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    args = parser.parse_args()
    need_gpu()
    table = Table()
    print(torch.cuda.get_device_name())
    print(f"{'us per call':52} {'ours':>9} {'torch':>9} {'floor':>9} {'share':>7}")
    with torch.inference_mode():
        for part in args.parts:
            PARTS[part](table)
    if args.out:
        args.out.write_text(json.dumps(table.rows, indent=1))


if __name__ == "__main__":
    main()
