"""Runs many streaming connections at one gateway at once, and measures their cost."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from foredraft.bench import prompts
from foredraft.bench.http_client import ConnectionBroken, HttpClient
from foredraft.cli import serve_config, stack
from foredraft.cli.supervisor import Supervisor
from testing.chaos import processes

SAMPLE_SECONDS = 0.5
ROUTE = "/v1/chat/completions"


@dataclass(slots=True)
class Stream:
    """Results of one connection.

    Attributes:
        first: Seconds until the first piece of text.
        last: Seconds until the end.
        tokens: Output tokens, by the usage in the last event.
        error: Error message; empty without one.
    """

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    error: str = ""


@dataclass(slots=True)
class Result:
    """Results of a run.

    Attributes:
        seconds: Time from the first connection to the last end.
        cpu_seconds: Processor time by service during the run.
        before: Footprints when the stack was idle before the run; `after` holds those when it was
            idle again.
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
        """Number of tokens of all streams."""
        return sum(stream.tokens for stream in self.streams)

    @property
    def errors(self) -> list[str]:
        """Error messages of all streams."""
        return [stream.error for stream in self.streams if stream.error]

    @property
    def microseconds_per_token(self) -> float:
        """The gateway's processor time per token."""
        return self.cpu_seconds["gateway"] / max(self.num_tokens, 1) * 1e6

    def peak(self, service: str) -> float:
        """Returns the highest memory in MiB."""
        return max(sample[service] for _, sample in self.memory)


@contextmanager
def running(
    model: str, connections: int, tokens: int, algorithm: str = "NGRAM", threads: int = 1
) -> Iterator[Supervisor]:
    """Runs a stack with room for all connections at once."""
    values = serve_config.resolve_models({"model_path": model})
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
    before = {name: processes.cpu_seconds(pid) for name, pid in pids.items()}
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
    result.cpu_seconds = {
        name: processes.cpu_seconds(pid) - before[name] for name, pid in pids.items()
    }
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
