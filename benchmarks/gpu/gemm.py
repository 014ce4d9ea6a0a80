"""Matrix products of one decode step at the shape of Llama-3.1-8B by our kernels and by cuBLAS,
beside the floor.

    python -m benchmarks.gpu.gemm --rows 1 2 4 8 16 32 64

Each product in a CUDA graph over several layers' weights, so that nothing is found in the cache;
then all of them in the order of a forward. The floor is the bytes of the weights at 4.49 TB/s.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch

from benchmarks.gpu.needed import need_gpu
from benchmarks.results_folder import results_folder
from foredraft.kernel_launch import times_on_gpu
from foredraft.layers import skinny_gemm

SHAPES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
LAYERS = ("qkv", "output", "gate_up", "down")
NUM_COPIES = 8  # copies of each layer; a "forward" here is these and the LM head
BANDWIDTH = 4.49e12


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    weights = {
        name: [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
            for _ in range(NUM_COPIES if name in LAYERS else 1)
        ]
        for name, shape in SHAPES.items()
    }
    results = []
    for rows in args.rows:
        for name in (*SHAPES, "forward"):
            row = _measure(name, rows, weights)
            results.append(row)
            ours = f"{row['ours_us']:8.1f}" if row["ours_us"] else f"{'-':>8}"
            print(
                f"rows {rows:3} {name:8} floor {row['floor_us']:7.1f} us  cuBLAS"
                f" {row['cublas_us']:7.1f}  ours {ours}",
                flush=True,
            )
    (args.out / "gpu_gemm.json").write_text(json.dumps(results, indent=1))
    return 0


def _measure(name: str, rows: int, weights: dict[str, list[torch.Tensor]]) -> dict[str, float]:
    names = [name] if name in SHAPES else list(SHAPES)
    inputs = {
        n: torch.randn(rows, SHAPES[n][1], device="cuda", dtype=torch.bfloat16) for n in names
    }

    def run(multiply: Callable[[torch.Tensor, torch.Tensor, bool], object]) -> None:
        for copy in range(NUM_COPIES):
            for n in names:
                if n in LAYERS:
                    multiply(inputs[n], weights[n][copy], n == "gate_up")
        if "lm_head" in names:
            multiply(inputs["lm_head"], weights["lm_head"][0], False)

    def cublas(x: torch.Tensor, w: torch.Tensor, gated: bool) -> object:
        return torch.mm(x, w.t())

    def ours(x: torch.Tensor, w: torch.Tensor, gated: bool) -> object:
        if gated:
            return skinny_gemm.multiply(x, w, None, gated=True)
        parts = skinny_gemm.num_parts(x, w)
        return (
            skinny_gemm.multiply(x, w, None)
            if parts == 1
            else skinny_gemm.multiply_in_parts(x, w, parts)
        )

    def whole(microseconds: float) -> float:
        """Returns the time of one layer's product, or of a forward of all layers, from a run
        over the copies.
        """
        if name in LAYERS:
            return microseconds / NUM_COPIES
        return microseconds

    floor = sum(SHAPES[n][0] * SHAPES[n][1] * 2 * (NUM_COPIES if n in LAYERS else 1) for n in names)
    return {
        "name": name,  # type: ignore[dict-item]
        "rows": rows,
        "floor_us": whole(floor / BANDWIDTH * 1e6),
        "cublas_us": whole(_time(lambda: run(cublas))),
        "ours_us": whole(_time(lambda: run(ours))) if rows <= skinny_gemm.MOST_ROWS else 0.0,
    }


def _time(run: Callable[[], None]) -> float:
    """Returns median microseconds of a captured run."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return statistics.median_high(times_on_gpu(graph.replay, 12)) * 1e3


if __name__ == "__main__":
    sys.exit(main())
