"""Time of one layer's attention on one GPU, by backend: prompts, decode steps and trees.

    python -m benchmarks.gpu.attention_backends

Heads of Llama-3.1-8B in bfloat16, random numbers, pages of 16 tokens in random order. Each line
captures a graph of one call for each layer of the cache and replays it. `strict` is ours with
`--exactness strict`; `strict triton` and `triton` are our Triton kernels with `strict` and `off`,
which cards without kernels of their own have. As in captured steps, page tables of decode steps and
trees under `strict` have room for ROOM tokens. flashinfer runs if it is installed
with compiled kernels: prompts by both generations of its kernels over pages, by the newer one over
keys in one piece too, decode steps and trees by the older one. The last column of a backend is its
largest difference from `strict`, relative to the largest number.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu.kernels import microseconds
from benchmarks.gpu.needed import need_gpu
from benchmarks.results_folder import results_folder
from foredraft.attention.base import AttentionBackend, Batch, SequenceSpan
from foredraft.attention.choice import exact_attention_for
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.paged_triton import TritonAttention
from foredraft.attention.triton_plan import plan_of_spans
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import ancestor_mask

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True, slots=True)
class Case:
    """A step: so many sequences with so many rows each, after so many keys.

    Attributes:
        kind: `prompt`, `decode` or `tree`.
    """

    kind: str
    batch: int
    rows: int
    keys: int

    @property
    def flops(self) -> float:
        """Floating-point operations of a layer."""
        seen = self.rows * self.keys + self.rows * (self.rows + 1) / 2
        return 4.0 * self.batch * seen * HEADS * HEAD_DIM

    @property
    def num_bytes(self) -> float:
        """Bytes of keys and values of a layer."""
        return 4.0 * self.batch * (self.keys + self.rows) * KV_HEADS * HEAD_DIM


PROMPTS = [
    Case("prompt", 1, 1024, 0),
    Case("prompt", 8, 1024, 0),
    Case("prompt", 1, 8192, 0),
    Case("prompt", 1, 8192, 24576),
    Case("prompt", 1, 8192, 122880),
]
DECODES = [
    Case("decode", batch, 1, keys) for keys in (600, 2000, 8192) for batch in (1, 8, 32, 128)
] + [
    *(Case("decode", batch, 8, keys) for keys in (600, 2000, 8192) for batch in (1, 8)),
    Case("decode", 1, 1, 32768),
    Case("decode", 1, 1, 131000),
]
TREES = [
    Case("tree", batch, rows, keys)
    for keys in (600, 2000, 8192)
    for rows in (8, 16, 32)
    for batch in (1, 4, 8, 16)
]
ROOM = 10240


class Work:
    """Spans, cache and queries of a case; the same for all backends."""

    def __init__(self, case: Case, layers: int) -> None:
        rng = np.random.default_rng(case.keys + case.rows)
        each = -(-(case.keys + case.rows) // PAGE_SIZE)
        self.case, self.layers = case, layers
        self.kv = PagedKV(
            layers, case.batch * each, PAGE_SIZE, KV_HEADS, HEAD_DIM, torch.bfloat16, "cuda"
        )
        for layer in self.kv.data:
            layer.normal_()
        pages = rng.permutation(case.batch * each).reshape(case.batch, each)
        parents = [int(rng.integers(-1, node)) for node in range(case.rows - 1)]
        self.mask = ancestor_mask(parents) if case.kind == "tree" else None
        depth = np.arange(case.rows) if self.mask is None else self.mask.sum(1).numpy() - 1
        positions = case.keys + depth
        self.spans = [
            SequenceSpan(
                index * case.rows,
                positions,
                pages[index],
                0,
                case.keys,
                case.keys,
                self.mask,
                None if self.mask is None else positions,
            )
            for index in range(case.batch)
        ]
        rows = torch.from_numpy(np.tile(positions, case.batch)).cuda()
        self.batch = Batch(rows, rows, rows, self.spans)
        self.queries = torch.randn(len(rows), HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(len(rows), HEADS * HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views [pages, KV heads, page size, head_dim] of a layer's keys and values."""
        keys, values = self.kv.keys(layer), self.kv.values(layer)
        return tuple(x.unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1) for x in (keys, values))


Attend = Callable[[int], Any]


def own(backend: AttentionBackend, work: Work) -> Attend:
    group, batch = HEADS // KV_HEADS, work.batch
    if work.case.kind != "prompt" and not isinstance(backend, TritonAttention):
        made = plan_of_spans(batch, work.kv, group)
        missing = max(0, ROOM // PAGE_SIZE - made.page_tables.shape[1])
        made.page_tables = F.pad(made.page_tables, (0, missing))
        batch = replace(batch, plan=made)
    plan = backend.plan(batch, work.kv, (None,), group)
    return lambda layer: backend.attend(plan, work.queries, layer, None, SCALE, work.out)


def paged(generation: str, work: Work) -> Attend:
    """Prompts, decode steps and trees of flashinfer over pages."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    case = work.case
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "HND", backend=generation
    )
    each, keys = len(work.spans[0].pages), case.keys + case.rows
    mask = None
    if work.mask is not None:
        seen = torch.ones(case.rows, keys, dtype=torch.bool)
        seen[:, case.keys :] = work.mask
        mask = seen.flatten().repeat(case.batch).cuda()
    wrapper.plan(
        torch.arange(case.batch + 1, dtype=torch.int32) * case.rows,
        torch.arange(case.batch + 1, dtype=torch.int32) * each,
        torch.from_numpy(np.concatenate([span.pages for span in work.spans]).astype(np.int32)),
        torch.full((case.batch,), (keys - 1) % PAGE_SIZE + 1, dtype=torch.int32),
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        PAGE_SIZE,
        custom_mask=mask,
        causal=mask is None,
        sm_scale=SCALE,
        q_data_type=torch.bfloat16,
    )
    out = work.out.view(work.queries.shape)
    return lambda layer: wrapper.run(work.queries, work.pages(layer), out=out)


def in_one_piece(work: Work) -> Attend:
    """Prompts of flashinfer's newer kernels over keys that lie one after another."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    case = work.case
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", backend="fa3"
    )
    keys = case.keys + case.rows
    ends = torch.arange(case.batch + 1, dtype=torch.int32)
    wrapper.plan(
        ends * case.rows,
        ends * keys,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        causal=True,
        sm_scale=SCALE,
        q_data_type=torch.bfloat16,
    )
    out = work.out.view(work.queries.shape)
    dense = [
        (work.kv.keys(layer).transpose(0, 1), work.kv.values(layer).transpose(0, 1))
        for layer in range(work.layers)
    ]
    total = case.batch * keys
    return lambda layer: wrapper.run(
        work.queries, dense[layer][0][:total], dense[layer][1][:total], out=out
    )


def backends(case: Case) -> Iterator[tuple[str, Callable[[Work], Attend]]]:
    yield "strict", lambda work: own(exact_attention_for(torch.device("cuda")), work)
    yield "strict triton", lambda work: own(ExactAttention(), work)
    yield "triton", lambda work: own(TritonAttention(), work)
    if importlib.util.find_spec("flashinfer") is None:
        return
    yield "fa2", lambda work: paged("fa2", work)
    if case.kind == "prompt":
        yield "fa3", lambda work: paged("fa3", work)
        yield "fa3 in one piece", in_one_piece


def measure(case: Case, layers: int) -> dict[str, Any]:
    """Returns microseconds of a layer, and differences from `strict`, by backend."""
    work, row = Work(case, layers), {"case": str(case)}
    wanted = None
    for name, make in backends(case):
        try:
            attend = make(work)
            work.out.zero_()
            attend(0)
            torch.cuda.synchronize()
            found = work.out.float()
            wanted = found if wanted is None else wanted
            error = float((found - wanted).abs().max() / wanted.abs().max())
            row[name] = {"us": microseconds(attend, layers), "error": error}
        except Exception as failure:
            row[name] = {"failure": f"{type(failure).__name__}: {str(failure)[:160]}"}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=["prompt", "decode", "tree"])
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu()
    rows = []
    for case in PROMPTS + DECODES + TREES:
        if case.kind not in args.kinds:
            continue
        layers = 4 if case.kind == "prompt" else 8
        rows.append(measure(case, layers))
        torch.cuda.empty_cache()
        print(_line(case, rows[-1]), flush=True)
    (args.out / "attention_backends.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _line(case: Case, row: dict[str, Any]) -> str:
    cells = []
    for name, cell in row.items():
        if name == "case":
            continue
        if "us" not in cell:
            cells.append(f"{name} {cell['failure']}")
            continue
        rate = (
            f"{case.flops / cell['us'] / 1e6:.0f} TFLOP/s"
            if case.kind == "prompt"
            else f"{case.num_bytes / cell['us'] / 1e6:.2f} TB/s"
        )
        cells.append(f"{name} {cell['us']:.1f} us {rate} ({cell['error']:.4f})")
    return f"{case.kind} {case.batch} x {case.rows} after {case.keys}: " + "; ".join(cells)


if __name__ == "__main__":
    sys.exit(main())
