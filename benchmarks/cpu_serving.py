"""Decoding speed on the CPU, end to end: transformers, the engine in process, and the three
services.

    python -m benchmarks.cpu_serving --model-path demo-gemma --out benchmarks/results

Runs in turn, on the same prompts and weights (float32, greedy): `transformers.generate`; the engine
called in process without drafts; the three services without drafts (what the split costs); the
three services with n-gram drafts (what speculation brings). Prints a table of decoded tokens/s and
ratios, writes JSON and a plot.
"""

import argparse
import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.model_paths import model_directory
from benchmarks.results_folder import results_folder
from foredraft.cli.stack import make_supervisor
from foredraft.config.services import VerifyConfig
from foredraft.cpu.threads import use_threads
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import SamplingParams

CODE = '''def read_rows(path, delimiter=","):
    """Reads a table from a text file and returns its rows."""
    rows = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            rows.append(line.rstrip("\\n").split(delimiter))
    return rows


def write_rows(path, rows, delimiter=","):
    """Writes rows to a text file."""
    with open(path, "w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(delimiter.join(row) + "\\n")
'''
TEXT = (
    "The harbour of the old town lies behind a long stone wall. In winter the fishing boats stay"
    " inside it, and the nets hang from the masts to dry. In summer the ferries leave every hour"
    " for the three islands, and the cafes along the wall are full until midnight."
)
ROWS = "\n".join(f"| {name} | {year} | {place} |" for name, year, place in [
    ("Ada", 1815, "London"), ("Alan", 1912, "London"), ("Grace", 1906, "New York"), ("Edsger", 1930, "Rotterdam"),  # noqa: E501
    ("Barbara", 1939, "Los Angeles"), ("Donald", 1938, "Milwaukee"), ("John", 1927, "Boston"), ("Frances", 1932, "Peru"),  # noqa: E501
])  # fmt: skip
# The target is a base model: a text that stands there twice is copied a third time.
PROMPTS = {
    "copy code": f"{CODE}\n\n{CODE}\n\ndef read_rows(",
    "copy text": (
        f"Read this paragraph.\n\n{TEXT}\n\nThe paragraph once more, word for word:\n\nThe"
        " harbour of"
    ),
    "extract": (
        f"| name | born | place |\n| --- | --- | --- |\n{ROWS}\n\nThe rows again, in the same"
        f" order:\n\n{ROWS}\n\nAnd again:\n\n| Ada |"
    ),
    "list": (
        "A numbered list of the countries of Europe with their capitals:\n1. France: Paris\n2."
        " Germany: Berlin\n3."
    ),
    "essay": "The most important difference between a democracy and a monarchy is",
    "story": "Once upon a time, in a village between two mountains, there lived a",
}


@dataclass(frozen=True, slots=True)
class Run:
    """Decoding of a prompt.

    Holds tokens after the first, and seconds from the first token to the last.
    """

    tokens: list[int]
    seconds: float
    accept_length: float = 1.0

    @property
    def rate(self) -> float:
        """Decoded tokens per second."""
        return (len(self.tokens) - 1) / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-path", default="demo-gemma")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    path = model_directory(args.model_path)
    use_threads(args.threads)
    ids = {name: _encode(path, prompt) for name, prompt in PROMPTS.items()}
    table: dict[str, dict[str, list[Run]]] = {}
    table["transformers"] = _transformers(path, ids, args)
    with _engine(path, args) as generate:
        table["engine, plain"] = _runs(generate, ids, args)
    with _services(path, "NONE", args) as generate:
        table["services, plain"] = _runs(generate, ids, args)
    with _services(path, "NGRAM", args) as generate:
        table["services, NGRAM"] = _runs(generate, ids, args)
    _report(table, args)
    return 0


def _encode(path: Path, text: str) -> list[int]:
    return Tokenizer.from_dir(path).encode(text)


Generate = Callable[[list[int], int], Run]


def _runs(
    generate: Generate, ids: dict[str, list[int]], args: argparse.Namespace
) -> dict[str, list[Run]]:
    generate(ids["story"], 8)
    return {
        name: [generate(prompt, args.tokens) for _ in range(args.repeats)]
        for name, prompt in ids.items()
    }


def _transformers(
    path: Path, ids: dict[str, list[int]], args: argparse.Namespace
) -> dict[str, list[Run]]:
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def generate(prompt: list[int], num_tokens: int) -> Run:
        clock = Clock()
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                streamer=clock,
            )
        # The streamer is first handed the prompt.
        return Run(output[0, len(prompt) :].tolist(), clock.times[-1] - clock.times[1])

    return _runs(generate, ids, args)


@contextlib.contextmanager
def _engine(path: Path, args: argparse.Namespace) -> Iterator[Generate]:
    from verify_service.engine.live_requests import EngineRequest
    from verify_service.metrics import SpeculationMetrics
    from verify_service.outputs import Load, StepOutput
    from verify_service.startup import build_engine, load_target

    config = VerifyConfig(
        model_path=str(path), speculative_algorithm="NONE", device="cpu", num_threads=args.threads, max_total_tokens=8192,  # noqa: E501
        disable_radix_cache=True,
    )  # fmt: skip
    target = load_target(config)
    engine = build_engine(config, target, SpeculationMetrics("NONE"), [])
    engine.start()

    def generate(prompt: list[int], num_tokens: int) -> Run:
        tokens: list[int] = []
        times: list[float] = []
        done = threading.Event()

        def take(outputs: list[StepOutput], load: Load) -> None:
            times.append(time.perf_counter())
            for output in outputs:
                tokens.extend(output.tokens)
                if output.finish is not None:
                    done.set()

        sampling = SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)
        engine.submit(EngineRequest(tag=0, prompt=prompt, sampling=sampling, sink=take))
        done.wait()
        return Run(tokens, times[-1] - times[0])

    yield generate
    engine.stop()


@contextlib.contextmanager
def _services(path: Path, algorithm: str, args: argparse.Namespace) -> Iterator[Generate]:
    import grpc

    from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc

    values = {
        "model_path": str(path),
        "speculative_algorithm": algorithm,
        "device": "cpu",
        "num_threads": args.threads,
        "max_total_tokens": 8192,
        "disable_radix_cache": True,
        "speculative_ngram_scope": "request",
        "port": 0,
        "grpc_port": 0,
        "log_level": "warning",
    }
    supervisor = make_supervisor(
        values, on_line=lambda name, line: print(f"{name}: {line}", file=sys.stderr)
    )
    supervisor.start()
    supervisor.wait_healthy()
    stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(supervisor.urls["grpc"]))

    def generate(prompt: list[int], num_tokens: int) -> Run:
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt))
        request.sampling.temperature = 0.0
        request.sampling.max_new_tokens = num_tokens
        request.sampling.ignore_eos = True
        tokens: list[int] = []
        times: list[float] = []
        accept_length = 1.0
        for response in stub.Generate(request):
            times.append(time.perf_counter())
            tokens.extend(token.id for token in response.tokens)
            if response.HasField("completion"):
                accept_length = response.completion.speculation.accept_length
        return Run(tokens, times[-1] - times[0], accept_length)

    try:
        yield generate
    finally:
        supervisor.stop()


def _report(table: dict[str, dict[str, list[Run]]], args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    rates = {
        kind: {name: statistics.median(run.rate for run in runs) for name, runs in rows.items()}
        for kind, rows in table.items()
    }
    plain, split = rates["engine, plain"], rates["services, plain"]
    view = Table(
        "decoded tokens/s (ratio)",
        *PROMPTS,
        title=f"{args.model_path}, float32, {args.threads} threads",
    )
    base = {
        "transformers": rates["transformers"],
        "engine, plain": rates["transformers"],
        "services, plain": plain,
        "services, NGRAM": split,
    }
    for kind, row in rates.items():
        against = base[kind]
        cells = []
        for name in PROMPTS:
            accept = statistics.median(run.accept_length for run in table[kind][name])
            extra = f", accept {accept:.2f}" if "NGRAM" in kind else ""
            cells.append(f"{row[name]:.1f} ({row[name] / against[name]:.2f}x{extra})")
        view.add_row(kind, *cells)
    Console(width=160).print(view)
    print("ratios: engine to transformers, services to engine, NGRAM to services without drafts")
    for name in PROMPTS:
        outputs = {kind: rows[name][0].tokens for kind, rows in table.items()}
        different = [
            kind for kind, tokens in outputs.items() if tokens != outputs["services, plain"]
        ]
        print(
            f"{name}: "
            + (
                "all four outputs are equal"
                if not different
                else f"differs: {', '.join(different)}"
            )
        )
    result = {
        "model": args.model_path,
        "threads": args.threads,
        "tokens": args.tokens,
        "tokens_per_second": rates,
    }
    (args.out / "cpu_serving.json").write_text(json.dumps(result, indent=1))
    _plot(rates, args.out / "cpu_serving.png")


def _plot(rates: dict[str, dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    width = 0.8 / len(rates)
    for i, (kind, row) in enumerate(rates.items()):
        axes.bar([x + i * width for x in range(len(row))], list(row.values()), width, label=kind)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(PROMPTS))], list(PROMPTS))
    axes.set_ylabel("decoded tokens/s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path} and {path.with_suffix('.json')}")


if __name__ == "__main__":
    sys.exit(main())
