"""Cost of one target forward on the CPU by number of rows, beside transformers and the floor that
memory sets.

    python -m benchmarks.cpu_forward --model-path demo-gemma --out benchmarks/results

Float32. Every figure is the least of several repetitions that are interleaved, so that a busy
moment of a shared machine hits all alike. The floor is the bytes of the weights over the bandwidth
of a plain read, measured in the same run. `--kernels` adds the ways of multiplying few rows with
the model's matrices, from which `layers/cpu_products.py` chooses.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.model_paths import model_directory
from benchmarks.results_folder import results_folder
from foredraft.attention.cpu import CpuAttention
from foredraft.cpu.threads import use_threads
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.cpu_products import float32_linear
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import load_model
from foredraft.runner.batch import SequenceRows
from foredraft.runner.model_runner import ModelRunner

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXT = 256
PAGE_SIZE = 32
READ_BYTES = 400_000_000

Jobs = dict[tuple[str, int], Callable[[], object]]


def main() -> None:
    """Measures, prints a table, writes cpu_forward.json and cpu_forward.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default="demo-gemma")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    path = model_directory(arguments.model_path)
    model = load_model(path, torch.float32)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    jobs: Jobs = own_jobs(model) | transformers_jobs(path)
    buffer = torch.ones(READ_BYTES // 4)
    jobs[("read", 0)] = buffer.sum
    best = measure(jobs, arguments.repetitions)
    bandwidth = READ_BYTES / best[("read", 0)]
    result = {
        "model": arguments.model_path,
        "threads": arguments.threads,
        "context": CONTEXT,
        "weight_bytes": weight_bytes,
        "bandwidth": bandwidth,
        "floor_ms": weight_bytes / bandwidth * 1e3,
        "forward_ms": {
            name: {rows: best[(name, rows)] * 1e3 for rows in (*ROWS, CONTEXT)}
            for name in ("foredraft", "transformers")
        },
    }
    print_forwards(result)
    if arguments.kernels:
        del jobs
        result["kernels_ms"] = measure_kernels(model, arguments.repetitions)
    (arguments.out / "cpu_forward.json").write_text(json.dumps(result, indent=1))
    plot(result, arguments.out / "cpu_forward.png")


def own_jobs(model: DecoderModel) -> Jobs:
    """Returns jobs that compute rows after CONTEXT cached tokens, and the prefill of these."""
    num_pages = (CONTEXT + max(ROWS)) // PAGE_SIZE + 1
    kv = PagedKV.for_model(model.config, num_pages, PAGE_SIZE, torch.float32, "cpu")
    runner, pages = ModelRunner(model, kv, CpuAttention()), list(range(num_pages))
    prompt = [1000 + i for i in range(CONTEXT)]

    def rows(count: int) -> Callable[[], object]:
        return lambda: runner.forward([SequenceRows.chunk(pages, CONTEXT, prompt[:count], "all")])

    jobs: Jobs = {("foredraft", count): rows(count) for count in ROWS}
    jobs[("foredraft", CONTEXT)] = lambda: runner.forward(
        [SequenceRows.chunk(pages, 0, prompt, "last")]
    )
    jobs[("foredraft", CONTEXT)]()
    return jobs


def transformers_jobs(path: Path) -> Jobs:
    """Returns the same jobs by transformers, whose cache is cut back after each forward."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompt = torch.arange(1000, 1000 + CONTEXT).unsqueeze(0)

    @torch.inference_mode()
    def prefill() -> Any:
        return model(prompt, use_cache=True, logits_to_keep=1).past_key_values

    cache = prefill()

    def rows(count: int) -> Callable[[], object]:
        @torch.inference_mode()
        def run() -> None:
            model(prompt[:, :count], past_key_values=cache, use_cache=True)
            cache.crop(-count)

        return run

    return {("transformers", count): rows(count) for count in ROWS} | {
        ("transformers", CONTEXT): prefill
    }


def measure(jobs: Jobs, repetitions: int) -> dict[tuple[str, int], float]:
    """Returns the least seconds of each job; the first round warms up."""
    best: dict[tuple[str, int], float] = {}
    for repetition in range(repetitions + 1):
        for key, job in jobs.items():
            started = time.perf_counter()
            job()
            seconds = time.perf_counter() - started
            if repetition:
                best[key] = min(best.get(key, seconds), seconds)
    return best


@torch.inference_mode()
def measure_kernels(model: DecoderModel, repetitions: int) -> dict[str, dict[int, float]]:
    """Returns milliseconds of all the model's products, by way of computing them and number of
    rows.
    """
    weights = [model.lm_head.weight]
    for layer in model.decoder_layers:
        linears = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        weights.extend(linear.weight for linear in linears)
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "F.linear": lambda x, weight: F.linear(x, weight),
        "(W x^T)^T": lambda x, weight: torch.mm(weight, x.t()).t().contiguous(),
        "oneDNN": lambda x, weight: torch.ops.mkldnn._linear_pointwise(
            x, weight, None, "none", [], ""
        ),
        "chosen": lambda x, weight: float32_linear(x, weight, None),
    }
    inputs = {(n, w.shape[1]): torch.randn(n, w.shape[1]) for n in ROWS for w in weights}

    def all_products(name: str, rows: int) -> Callable[[], object]:
        return lambda: [ways[name](inputs[(rows, w.shape[1])], w) for w in weights]

    jobs: Jobs = {(name, rows): all_products(name, rows) for name in ways for rows in ROWS}
    best = measure(jobs, repetitions)
    print("all products of the model, ms\nrows " + "".join(f"{rows:>8}" for rows in ROWS))
    table = {name: {rows: best[(name, rows)] * 1e3 for rows in ROWS} for name in ways}
    for name, by_rows in table.items():
        print(f"{name:10}" + "".join(f"{value:8.1f}" for value in by_rows.values()))
    return table


def print_forwards(result: dict) -> None:
    """Prints the table of the module's docstring."""
    floor = result["floor_ms"]
    print(
        f"{result['model']}, float32, {result['threads']} threads, {CONTEXT} tokens cached; weights"
        f" {result['weight_bytes'] / 1e6:.0f} MB, read at {result['bandwidth'] / 1e9:.1f} GB/s:"
        f" floor {floor:.1f} ms"
    )
    print(
        f"{'rows':>8}{'ours ms':>10}{'x floor':>9}{'x 1 row':>9}{'transformers ms':>17}{'ratio':>8}"
    )
    own, other = (result["forward_ms"][name] for name in ("foredraft", "transformers"))
    for rows, ms in own.items():
        label = f"prefill {rows}" if rows == CONTEXT else str(rows)
        print(
            f"{label:>11}{ms:7.1f}{ms / floor:9.2f}{ms / own[1]:9.2f}{other[rows]:17.1f}{other[rows] / ms:8.2f}"  # noqa: E501
        )


def plot(result: dict, file: Path) -> None:
    """Plots milliseconds by rows: ours, transformers, floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, by_rows in result["forward_ms"].items():
        axes.plot(ROWS, [by_rows[rows] for rows in ROWS], marker="o", label=name)
    axes.axhline(result["floor_ms"], color="gray", linestyle="--", label="read of the weights")
    axes.set(xlabel="rows in the forward", ylabel="ms", ylim=(0, None), xticks=ROWS)
    axes.set_title(f"{result['model']}, float32, {result['threads']} threads")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
