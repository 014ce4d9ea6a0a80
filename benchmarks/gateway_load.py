"""Many streaming connections at one gateway: errors, fairness, memory, and what a token costs the gateway.

    python -m benchmarks.gateway_load --connections 500 --tokens 128

Starts gateway, verifier and draft on the bundled model with room for all connections at once, opens the connections
together, and streams /v1/chat/completions on each. The gateway's cost is its processor time (user and system, from
/proc) over the tokens that it streamed. A run of one token each before tells what a request costs, and so what a token
costs without its share of that. Processor time depends less than wall-clock time on what else the machine does, but it
does: caches are shared. Prints a table, writes JSON and a plot.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.chaos_suite import processes
from foredraft.bench import plots, prompts
from foredraft.bench.http_client import ConnectionBroken, HttpClient
from foredraft.cli import stack
from foredraft.cli.supervisor import Supervisor

SAMPLE_SECONDS = 0.5
ROUTE = "/v1/chat/completions"


@dataclass(slots=True)
class Stream:
    """One connection.

    Attributes:
        first: Seconds until the first piece of text.
        last: Seconds until the end.
        tokens: Output tokens, by the usage in the last event.
        error: What went wrong; empty where nothing did.
    """

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    error: str = ""


@dataclass(slots=True)
class Result:
    """A run.

    Attributes:
        seconds: From the first connection to the last end.
        cpu_seconds: Processor time by service while it lasted.
        before: Footprints when the stack was idle; `after` likewise, once it was again.
        memory: (seconds, service -> MiB) while it ran.
    """

    streams: list[Stream]
    seconds: float = 0.0
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    before: dict[str, processes.Footprint] = field(default_factory=dict)
    after: dict[str, processes.Footprint] = field(default_factory=dict)
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Over all streams."""
        return sum(stream.tokens for stream in self.streams)

    @property
    def errors(self) -> list[str]:
        """What went wrong."""
        return [stream.error for stream in self.streams if stream.error]

    @property
    def microseconds_per_token(self) -> float:
        """Of the gateway's processor time."""
        return self.cpu_seconds["gateway"] / max(self.num_tokens, 1) * 1e6

    def peak(self, service: str) -> float:
        """MiB."""
        return max(sample[service] for _, sample in self.memory)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-path", default="foredraft-demo")
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--algorithm", default="NGRAM")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
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


@contextmanager
def running(
    model: str, connections: int, tokens: int, algorithm: str = "NGRAM", threads: int = 1
) -> Iterator[Supervisor]:
    """A stack with room for all connections at once."""
    values = stack.resolve_models({"model_path": model})
    values |= {
        "port": 0,
        "grpc_port": 0,
        "device": "cpu",
        "num_threads": threads,
        "speculative_algorithm": algorithm,
        "max_running_requests": connections,
        "max_total_tokens": connections * (tokens + 96),
    }
    supervisor = stack.make_supervisor(values, on_line=lambda name, line: None)
    with supervisor:
        supervisor.wait_healthy(timeout=300)
        yield supervisor


async def run(supervisor: Supervisor, connections: int, tokens: int) -> Result:
    """Streams on all connections at once and measures."""
    pids = {state.name: state.pid for state in supervisor.states() if state.pid is not None}
    result = Result([Stream() for _ in range(connections)])
    result.before = {name: processes.footprint(pid) for name, pid in pids.items()}
    before = {name: _cpu_seconds(pid) for name, pid in pids.items()}
    client = HttpClient(supervisor.urls["http"])
    started = time.perf_counter()
    sampler = asyncio.create_task(_sample(pids, result, started))
    await asyncio.gather(
        *(
            _stream(client, stream, _body(number, tokens), started)
            for number, stream in enumerate(result.streams)
        )
    )
    result.seconds = time.perf_counter() - started
    result.cpu_seconds = {name: _cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    sampler.cancel()
    client.close()
    await asyncio.sleep(1.0)
    result.after = {name: processes.footprint(pid) for name, pid in pids.items()}
    return result


def _body(number: int, tokens: int) -> bytes:
    draw = random.Random(number)
    content = (
        f"Tell me about {number} {draw.choice(prompts.WORDS)}s and a {draw.choice(prompts.WORDS)}."
    )
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def _stream(client: HttpClient, stream: Stream, body: bytes, started: float) -> None:
    tail = b""

    def on_body(now: float, data: bytes) -> None:
        nonlocal tail
        if not stream.first:
            stream.first = now - started
        tail = (tail + data)[-2000:]

    try:
        response = await client.post(ROUTE, body, on_body)
        if response.status != 200:
            stream.error = f"{response.status} {response.body[:200]!r}"
            return
        *_, last, done, _ = tail.split(b"\n\n")
        if done != b"data: [DONE]":
            stream.error = f"the stream ended with {done!r}"
            return
        event: dict[str, Any] = json.loads(last.removeprefix(b"data: "))
        if "error" in event:
            stream.error = str(event["error"])
            return
        stream.tokens = event["usage"]["completion_tokens"]
        stream.last = time.perf_counter() - started
    except ConnectionBroken as error:
        stream.error = str(error)


async def _sample(pids: dict[str, int], result: Result, started: float) -> None:
    while True:
        memory = {name: processes.footprint(pid).memory_mib for name, pid in pids.items()}
        result.memory.append((time.perf_counter() - started, memory))
        await asyncio.sleep(SAMPLE_SECONDS)


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process, its helpers' included, from proc_pid_stat(5)."""
    ticks = 0
    for one in (pid, *processes.descendants(pid)):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


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
        "| service | CPU s | CPU us/token | MiB before | peak | after | fds before | after | threads before | after |"
    )
    print("| --- |" + " ---: |" * 9)
    for name, before in result.before.items():
        cpu, after = result.cpu_seconds[name], result.after[name]
        print(
            f"| {name} | {cpu:.2f} | {cpu / result.num_tokens * 1e6:.1f} | {before.memory_mib:.0f} "
            f"| {result.peak(name):.0f} | {after.memory_mib:.0f} | {before.descriptors} | {after.descriptors} "
            f"| {before.threads} | {after.threads} |"
        )
    print(
        f"\nthe gateway: {per_request:.0f} us a request of one token, {per_token:.1f} us each further token; "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    args.out.mkdir(parents=True, exist_ok=True)
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
