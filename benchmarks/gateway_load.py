"""Many streaming connections at one gateway: errors, fairness, memory, and what a token costs the
gateway.

    python -m benchmarks.gateway_load --connections 500 --tokens 128

Starts gateway, verifier and draft on the bundled model with room for all connections at once, opens
the connections together, and streams /v1/chat/completions on each. The gateway's cost is its
processor time (user and system, from /proc) over the tokens that it streamed. A run of one token
each before measures the cost of a request, so that the cost of a token can be told from it.
Processor time depends less than wall-clock time on what else the machine does, but it does: caches
are shared. Prints a table, writes JSON and a plot.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import uvloop

from benchmarks.results_folder import results_folder
from foredraft.bench import plots
from testing.many_streams import Result, Stream, run, running


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-path", default="foredraft-demo")
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--algorithm", default="NGRAM")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    with running(
        args.model_path, args.connections, args.tokens, args.algorithm, args.threads
    ) as it:
        # The first requests load code and fill caches; a server that has been up has done that.
        uvloop.run(run(it, connections=8, tokens=8))
        time.sleep(1.0)
        short = uvloop.run(run(it, args.connections, tokens=1))
        result = uvloop.run(run(it, args.connections, args.tokens))
    _report(result, short, args)
    return 1 if result.errors else 0


def _report(result: Result, short: Result, args: argparse.Namespace) -> None:
    per_request = short.cpu_seconds["gateway"] / args.connections * 1e6
    more_tokens = max(result.num_tokens - short.num_tokens, 1)
    per_token = (result.cpu_seconds["gateway"] - short.cpu_seconds["gateway"]) / more_tokens * 1e6
    good = [stream for stream in result.streams if not stream.error]
    print(f"{args.connections} connections, {args.tokens} tokens each, {args.algorithm}")
    print(f"errors: {len(result.errors)} {result.errors[:3] or ''}")
    print(f"tokens: {result.num_tokens} in {result.seconds:.1f} s")
    print()
    print("| of one connection | min | median | max |\n| --- | ---: | ---: | ---: |")
    figures = {
        "tokens": [float(stream.tokens) for stream in good],
        "first text, s": [stream.first for stream in good],
        "end, s": [stream.last for stream in good],
        "tokens/s": [stream.tokens / stream.last for stream in good],
    }
    for name, values in figures.items():
        print(
            f"| {name} | {min(values):.2f} | {statistics.median(values):.2f} | {max(values):.2f} |"
        )
    print()
    print(
        "| service | CPU s | CPU us/token | MiB before | peak | after | fds before | after |"
        " threads before | after |"
    )
    print("| --- |" + " ---: |" * 9)
    for name, before in result.before.items():
        cpu, after = result.cpu_seconds[name], result.after[name]
        print(
            f"| {name} | {cpu:.2f} | {cpu / result.num_tokens * 1e6:.1f} | {before.memory_mib:.0f}"
            f" | {result.peak(name):.0f} | {after.memory_mib:.0f} | {before.descriptors} |"
            f" {after.descriptors} | {before.threads} | {after.threads} |"
        )
    print(
        f"\nthe gateway: {per_request:.0f} us a request of one token, {per_token:.1f} us each"
        f" further token; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    record = {
        "command": " ".join(["python -m benchmarks.gateway_load", *sys.argv[1:]]),
        "connections": args.connections,
        "tokens_each": args.tokens,
        "algorithm": args.algorithm,
        "errors": result.errors,
        "tokens": result.num_tokens,
        "seconds": result.seconds,
        "load_average": os.getloadavg(),
        "gateway_us_per_token": result.microseconds_per_token,
        "gateway_us_per_request": per_request,
        "gateway_us_per_further_token": per_token,
        "cpu_seconds": result.cpu_seconds,
        "fairness": {
            name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
            for name, values in figures.items()
        },
        "before": {name: asdict(footprint) for name, footprint in result.before.items()},
        "after": {name: asdict(footprint) for name, footprint in result.after.items()},
        "peak_mib": {name: result.peak(name) for name in result.before},
    }
    (args.out / "gateway_load.json").write_text(json.dumps(record, indent=2) + "\n")
    _draw(result, good, args.out / "gateway_load.png")


def _draw(result: Result, good: list[Stream], path: Path) -> None:
    pyplot = plots.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for label, values in (
        ("first text", sorted(stream.first for stream in good)),
        ("end", sorted(stream.last for stream in good)),
    ):
        left.plot(values, range(1, len(values) + 1), label=label)
    left.set(xlabel="seconds", ylabel="connections", title="connections that have their ...")
    left.set_xlim(left=0)
    left.legend()
    times = [when for when, _ in result.memory]
    for name in result.before:
        right.plot(times, [memory[name] for _, memory in result.memory], label=name)
    right.set(xlabel="seconds", ylabel="MiB", title="resident memory")
    right.set_ylim(bottom=0)
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
