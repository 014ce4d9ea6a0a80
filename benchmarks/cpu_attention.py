"""Attention on a CPU: our kernel beside SDPA, for prompts, chains and trees.

    python -m benchmarks.cpu_attention --threads 1

Float32, one layer, pages of 16 consecutive tokens. Every figure is the least of several repetitions
by turns.
"""

import argparse

import numpy as np
import torch

from benchmarks.cpu_forward import Jobs, measure
from foredraft.attention.base import AttentionBackend, Batch, SequenceSpan
from foredraft.attention.cpu import CpuAttention
from foredraft.attention.sdpa import SdpaAttention
from foredraft.cpu.threads import use_threads
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import ancestor_mask
from foredraft.trees.draft_tree import depths

PAGE_SIZE, NUM_PAGES = 16, 200
SHAPES = ((4, 2, 64), (32, 8, 128))  # query heads, KV heads, size of a head
# Cached keys, rows, whether the rows are a tree.
CASES = (
    (256, 1, False), (256, 8, False), (256, 8, True), (256, 64, False), (0, 256, False),
    (2000, 1, False), (2000, 8, True), (2000, 256, False),
)  # fmt: skip


def main() -> None:
    """Measures and prints a table in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=300)
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    print(f"{'heads':>12}{'cached':>8}{'rows':>10}{'ours us':>10}{'SDPA us':>10}{'ratio':>8}")
    for shape in SHAPES:
        for cached, rows, is_tree in CASES:
            jobs = _jobs(shape, cached, rows, is_tree)
            best = measure(jobs, arguments.repetitions if rows < 64 else 10)
            ours, other = (best[(name, rows)] * 1e6 for name in ("ours", "SDPA"))
            label = "{}/{} x {}".format(*shape)
            kind = f"{rows} tree" if is_tree else str(rows)
            print(f"{label:>12}{cached:8}{kind:>10}{ours:10.0f}{other:10.0f}{other / ours:8.1f}")


def _jobs(shape: tuple[int, int, int], cached: int, rows: int, is_tree: bool) -> Jobs:
    num_heads, num_kv_heads, head_dim = shape
    kv = PagedKV(1, NUM_PAGES, PAGE_SIZE, num_kv_heads, head_dim, torch.float32, "cpu")
    kv.data.normal_()
    positions, mask = np.arange(cached, cached + rows), None
    if is_tree:
        parents = [node // 2 - 1 for node in range(rows - 1)]
        positions = cached + np.array([0, *depths(parents)])
        mask = ancestor_mask(parents)
    span = SequenceSpan(
        0, positions, np.arange(NUM_PAGES), 0, cached, cached, mask, positions if is_tree else None
    )
    none = torch.zeros(rows, dtype=torch.int64)
    batch = Batch(none, torch.from_numpy(positions), none, [span])
    queries, out = torch.randn(rows, num_heads, head_dim), torch.empty(rows, num_heads * head_dim)

    def job(backend: AttentionBackend) -> object:
        plan = backend.plan(batch, kv, (None,), num_heads // num_kv_heads)
        return lambda: backend.attend(plan, queries, 0, None, head_dim**-0.5, out)

    return {("ours", rows): job(CpuAttention()), ("SDPA", rows): job(SdpaAttention())}


if __name__ == "__main__":
    main()
