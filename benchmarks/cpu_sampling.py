"""Time to choose tokens on a CPU, by vocabulary, rows and parameters, beside the rule as operations
of torch on whole rows.

    python -m benchmarks.cpu_sampling

Random logits, normal with a deviation of 3: flatter than a language model's, so that more tokens
can be chosen. Every figure is the median of repetitions that are interleaved, in microseconds.
"""

import argparse
import statistics
import time

import torch

from foredraft.cpu.threads import use_threads
from foredraft.sampling.rows import SamplingRows
from foredraft.sampling.sampling import choose, perturbed_top
from foredraft.types import SamplingParams

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(seed=3),
    "0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9, seed=3),
    "0.6, top-k 20, top-p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=3),
    "1, min-p 0.05": SamplingParams(min_p=0.05, seed=3),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vocab", nargs="+", type=int, default=[8192, 32000, 128256, 262144])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=30)
    args = parser.parse_args()
    use_threads(args.threads)
    print("| vocabulary, rows |", " | ".join(f"{name}, ours / torch" for name in KINDS), "|")
    print("| --- " * (1 + len(KINDS)) + "|")
    for vocab in args.vocab:
        for num_rows in args.rows:
            logits = 3 * torch.randn(num_rows, vocab)
            cells = [_cell(logits, params, args.repetitions) for params in KINDS.values()]
            print(f"| {vocab:,}, {num_rows} |", " | ".join(cells), "|", flush=True)


def _cell(logits: torch.Tensor, params: SamplingParams, repetitions: int) -> str:
    rows = SamplingRows.from_params([params] * len(logits), range(100, 100 + len(logits)))
    ours, dense = [], []
    for _ in range(repetitions):
        began = time.perf_counter()
        choose(logits, rows)
        between = time.perf_counter()
        if params.is_sampled:
            perturbed_top(logits, rows, 1, dense=True)
        else:
            logits.argmax(-1)
        ours.append(between - began)
        dense.append(time.perf_counter() - between)
    return f"{statistics.median(ours) * 1e6:.0f} / {statistics.median(dense) * 1e6:.0f}"


if __name__ == "__main__":
    main()
