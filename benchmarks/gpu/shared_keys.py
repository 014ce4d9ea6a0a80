"""Time of one layer's strict attention on one GPU where sequences begin with the same keys: each
reads them itself, or they are read once.

    python -m benchmarks.gpu.shared_keys

Heads of Llama-3.1-8B in bfloat16, random numbers, pages of 16 tokens in random order, replayed as a
graph. The last lines share nothing; `once` there is what a step would pay for looking in vain,
which captured steps do not: the host knows it before.
"""

import argparse
import sys
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.kernels import HEAD_DIM, HEADS, KV_HEADS, PAGE_SIZE, microseconds
from benchmarks.gpu.needed import need_gpu
from foredraft.attention.base import Batch
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.triton_plan import TritonPlan
from foredraft.kvcache.paged_kv import PagedKV
from verify_service.executor.captured.shared_keys import (
    COLUMNS,
    BlockSizes,
    Sharers,
    columns_of,
    find_groups,
    shared_keys,
)
from verify_service.executor.records import STEP

GROUP_SIZE, SCALE, LAYERS = HEADS // KV_HEADS, HEAD_DIM**-0.5, 6
MAX_KEYS = 9216  # of a page table; parts are cut for them


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of a step.

    Attributes:
        batch, rows: Number of sequences, and of rows of each.
        keys, shared: Number of keys before the rows, and how many of them all share.
    """

    batch: int
    rows: int
    keys: int
    shared: int


CASES = [
    *(Case(batch, 1, 2560, 2000) for batch in (8, 16, 32, 64, 128)),
    *(Case(batch, 4, 2560, 2000) for batch in (8, 16, 32, 64, 128)),
    *(Case(batch, 1, 9000, 8192) for batch in (8, 64)),
    Case(32, 1, 600, 512),
    Case(64, 1, 600, 256),
    *(Case(batch, rows, 600, 0) for rows in (1, 4) for batch in (8, 32, 128)),
]


def planned(case: Case) -> tuple[TritonPlan, TritonPlan]:
    """Returns the plan of a captured step, and the one that reads shared keys once."""
    each, common = -(-(case.keys + case.rows) // PAGE_SIZE), case.shared // PAGE_SIZE
    num_pages = common + case.batch * (each - common)
    kv = PagedKV(LAYERS, num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, torch.bfloat16, "cuda")
    for layer in kv.data:
        layer.normal_()
    ints = {"dtype": torch.int32, "device": "cuda"}
    order = torch.randperm(num_pages).to(**ints)
    tables = torch.zeros(case.batch, MAX_KEYS // PAGE_SIZE, **ints)
    tables[:, :common] = order[:common]
    tables[:, common:each] = order[common:].view(case.batch, -1)
    starts = torch.full((case.batch,), case.keys, **ints)
    positions = (starts[:, None] + torch.arange(case.rows, device="cuda")).flatten().long()
    mask = torch.ones(case.rows, case.rows, dtype=torch.uint8, device="cuda").tril()
    has_mask = case.rows > 1
    plan = TritonPlan(
        kv=kv,
        page_tables=tables,
        first_row=torch.arange(0, case.batch * case.rows, case.rows, **ints),
        num_rows=torch.full((case.batch,), case.rows, **ints),
        prefix_start=torch.zeros(case.batch, **ints),
        prefix_len=starts,
        write_index=starts,
        positions=positions,
        tail_mask=mask.repeat(case.batch, 1) if has_mask else None,
        tail_positions=positions.view(case.batch, -1).int() if has_mask else None,
        max_rows=case.rows,
        num_splits=1,
    )
    shape = case.batch, case.rows
    sizes = BlockSizes.of(ExactAttention(), kv, GROUP_SIZE, torch.bfloat16, shape)
    groups = find_groups([line[:each] for line in tables.tolist()], PAGE_SIZE)
    records = torch.zeros(case.batch, STEP.size, **ints)
    columns = columns_of(blocks_of(sizes, groups), case.batch)
    for name, column in zip(COLUMNS, columns, strict=True):
        records[:, STEP[name]] = torch.from_numpy(column).to(**ints)
    once = replace(plan, shared=shared_keys(records, case.rows, tables, sizes.count))
    return plan, once


def blocks_of(sizes: BlockSizes, groups: list[Sharers]) -> list[Sharers]:
    """Cuts groups into blocks, whether it pays or not."""
    return replace(sizes, key_bytes=1 << 40).cut(groups)


def measure(case: Case) -> None:
    """Prints microseconds of a layer."""
    backend, times, found = ExactAttention(), [], []
    size = case.batch * case.rows
    queries = torch.randn(size, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(size, HEADS * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    for plan in planned(case):
        batch = Batch(plan.positions, plan.positions, plan.positions, (), plan=plan)
        whole = backend.plan(batch, plan.kv, (None,), GROUP_SIZE)

        def attend(call: int, whole: TritonPlan = whole) -> None:
            backend.attend(whole, queries, call % LAYERS, None, SCALE, out)

        times.append(microseconds(attend, 4 * LAYERS))
        attend(0)
        found.append(out.clone())
    saved = (case.batch - 1) * case.shared * 4 * KV_HEADS * HEAD_DIM / 2**20
    print(
        f"{case.batch:4} x {case.rows} after {case.keys} keys, {case.shared} shared:"
        f" {times[0]:7.1f} us, once {times[1]:7.1f} us, {saved:5.0f} MiB are not read again,"
        f" bits {'equal' if torch.equal(*found) else 'DIFFER'}",
        flush=True,
    )


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    need_gpu()
    for case in CASES:
        measure(case)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
