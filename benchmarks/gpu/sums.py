"""Time of a sum of ranks with its norm on the GPUs of a host, in CUDA graphs: through memory that
the ranks share, inside the norm's kernel, and gathered by NCCL.

    python -m benchmarks.gpu.sums --ranks 2
"""

import argparse
import socket
import statistics
import sys
from collections.abc import Callable

import torch
import torch.multiprocessing as mp
from torch._C._distributed_c10d import TCPStore

from benchmarks.gpu.needed import need_gpu
from foredraft.kernel_launch import times_on_gpu
from foredraft.layers import fused
from foredraft.parallel.group import SINGLE, Group
from testing.cpu_ranks import NoLog
from verify_service.executor.ranks.cuda_group import CudaGroup

ROWS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096)
SUMS = 32  # of a graph
ROUNDS = 15


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", type=int, default=4096, help="numbers of a row, in bfloat16")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    args = parser.parse_args()
    need_gpu()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_measure, (args, port), nprocs=args.ranks)  # type: ignore[attr-defined]
    return 0


def _measure(rank: int, args: argparse.Namespace, port: int) -> None:
    """Runs a rank; the first one prints."""
    store = TCPStore("127.0.0.1", port, args.ranks, rank == 0, wait_for_workers=False)
    group = CudaGroup.join(rank, args.ranks, args.ranks, store, NoLog())
    memory, device = group._memory, torch.device("cuda", rank)
    assert memory is not None, "the cards cannot reach each other's memory"
    if rank == 0:
        print(f"us of a sum with its norm, {args.ranks} ranks, rows of {args.size} in bfloat16")
        print("| rows | norm alone | exchanged in it | gathered by NCCL |")
        print("| --- | --- | --- | --- |", flush=True)
    for rows in args.rows:
        stream = torch.randn(rows, args.size, device=device).bfloat16()
        delta = torch.randn(rows, args.size, device=device).bfloat16()
        weight = torch.ones(args.size, device=device).bfloat16()

        def run(of: Group, x: torch.Tensor) -> torch.Tensor:
            return fused.add_norm(x, delta, weight, 1e-5, False, group=of).rows  # noqa: B023

        group._memory = memory
        found = [_microseconds(run, SINGLE, stream), _microseconds(run, group, stream)]
        group._memory = None
        stream.normal_()
        found.append(_microseconds(run, group, stream))
        if rank == 0:
            print(f"| {rows} | " + " | ".join(f"{one:.1f}" for one in found) + " |", flush=True)
    group._memory = memory
    group.close()


def _microseconds(run: Callable[..., torch.Tensor], *arguments: object) -> float:
    """Returns the time of one call, captured many times over."""
    run(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SUMS):
            run(*arguments)
    times = times_on_gpu(graph.replay, ROUNDS)
    del graph
    return statistics.median(times[3:]) / SUMS * 1e3


if __name__ == "__main__":
    sys.exit(main())
