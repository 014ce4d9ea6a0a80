"""The same load through HTTP on several servers in turn: tokens/s, time to first token, gaps, and
the ratio to a peer.

    python -m benchmarks.http_load --server ours=http://127.0.0.1:30000 --server peer=http://127.0.0.1:8000 \\
        --concurrency 1 8 32 128 --prompt-words 100 --output-tokens 256

Every server with OpenAI's /v1/completions will do, and Foredraft's gRPC as grpc://host:port. The
client works in several processes, so that it is not what limits; each holds its share of the
streams and sends its next request when one ends (a closed loop). Prompts are random words, other
ones for each request, so no cache and no n-gram helps. Each load runs once unmeasured before it
counts.

    python -m benchmarks.http_load --server ours=http://127.0.0.1:30000 --system-words 550 \\
        --concurrency 64 --requests 6 --prompt-words 20 --output-tokens 128

With --system-words each stream is a conversation on /v1/chat/completions: its requests are its
turns, each has all that was said before, and the conversations of a load begin with one system
prompt. This is what prefix caches are for. With several servers on one GPU start one at a time and
use --append; side by side they need a GPU each.
"""  # noqa: E501

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing
import random
import re
import string
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
import numpy as np

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.bench import peers
from foredraft.bench.http_client import HttpClient
from foredraft.bench.load import LoadGenerator, Stage, send
from foredraft.bench.prompts import Message, Prompt
from foredraft.bench.records import Record
from foredraft.config.options import flag_of
from foredraft.errors import ConfigError
from foredraft.rpc.channel import aio_channel

GRPC = "grpc://"

CONNECT_SECONDS = 10.0
START_SECONDS = 1.0  # time between the start of processes and their common begin


@dataclass(frozen=True, slots=True)
class Load:
    """Describes one measurement of one server.

    Attributes:
        concurrency: Number of streams at the server.
        requests: Number of requests of each stream.
        prompt_words, output_tokens: Lengths of prompt and output; in a conversation, of each turn.
        system_words: Length of the system prompt that all conversations share; 0 for single
            requests.
    """

    concurrency: int
    requests: int
    prompt_words: int
    output_tokens: int
    system_words: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of a load; times in milliseconds.

    Attributes:
        later_ttft_p50: Median over the second and later turns of conversations; None without them.
        cached_tokens: Prompt tokens found in the server's cache, by its own report; mean of a
            request.
    """

    server: str
    load: Load
    tokens_per_second: float
    ttft_p50: float
    ttft_max: float
    gap_p50: float
    gap_p99: float
    prompt_tokens: float
    failed: int
    later_ttft_p50: float | None = None
    cached_tokens: float = 0.0


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    for pair in args.server:
        if not re.fullmatch(r"[^=]+=(http|https|grpc)://.+", pair):
            parser.error(f"--server {pair}: not NAME=URL with http://, https:// or grpc://")
    for field in ("requests", "prompt_words", "output_tokens", "processes"):
        if getattr(args, field) < 1:
            parser.error(f"{flag_of(field)} must be at least 1")
    if min(args.concurrency) < 1:
        parser.error("--concurrency must be at least 1")
    servers = dict(pair.split("=", 1) for pair in args.server)
    if args.system_words and any(url.startswith(GRPC) for url in servers.values()):
        parser.error("--system-words: conversations are sent over HTTP; give http:// servers")
    figures: list[Figures] = []
    if args.append and args.append.exists():
        lines = args.append.read_text().splitlines()
        figures = [_from_json(json.loads(line)) for line in lines]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        for concurrency in args.concurrency:
            load = Load(
                concurrency,
                args.requests,
                args.prompt_words,
                args.output_tokens,
                args.system_words,
            )
            for name, url in servers.items():
                try:
                    measure(pool, args.processes, name, url, replace(load, requests=1))
                except ConfigError as error:
                    parser.error(f"--server {name}={url}: {error}")
                figures.append(measure(pool, args.processes, name, url, load))
                print(_line(figures[-1]), flush=True)
                if args.append:
                    with args.append.open("a") as file:
                        file.write(json.dumps(asdict(figures[-1])) + "\n")
    print("\n" + table(figures))
    return 1 if any(one.failed for one in figures) else 0


def measure(pool: ProcessPoolExecutor, processes: int, name: str, url: str, load: Load) -> Figures:
    """Runs one load on one server."""
    count = min(processes, load.concurrency)
    begin = time.time() + START_SECONDS
    shares = [load.concurrency // count + (i < load.concurrency % count) for i in range(count)]
    seeds = (random.randrange(1 << 60) for _ in shares)
    system = _words(random.Random(), load.system_words)
    running = [
        pool.submit(_stream, url, share, load, system, seed, begin)
        for share, seed in zip(shares, seeds, strict=True)
    ]
    records = [record for future in running for record in future.result()]
    done = [record for record in records if record.ok]
    firsts = [record.ttft for record in done if record.ttft is not None] or [math.nan]
    later = [record.ttft for record in done if load.system_words and record.index and record.ttft]
    gaps = list(_gaps(done)) or [math.nan]
    return Figures(
        server=name,
        load=load,
        tokens_per_second=sum(record.output_tokens for record in done)
        / max((record.end for record in records), default=math.nan),
        ttft_p50=float(np.median(firsts)) * 1e3,
        ttft_max=max(firsts) * 1e3,
        gap_p50=float(np.median(gaps)) * 1e3,
        gap_p99=float(np.percentile(gaps, 99)) * 1e3,
        prompt_tokens=float(np.mean([record.prompt_tokens for record in done] or [math.nan])),
        failed=len(records) - len(done),
        later_ttft_p50=float(np.median(later)) * 1e3 if later else None,
        cached_tokens=float(np.mean([record.cached_tokens for record in done] or [math.nan])),
    )


def table(figures: list[Figures]) -> str:
    """Returns a Markdown table: a row for each load, a group of columns for each server, and
    the first over the second.
    """
    names = list(dict.fromkeys(one.server for one in figures))
    columns = [f"{name}: tokens/s | TTFT p50, max | gap p50, p99 (ms)" for name in names]
    ratio = f" {names[0]} / {names[1]} |" if len(names) == 2 else ""
    lines = [f"| streams | prompt | {' | '.join(columns)} |{ratio}"]
    lines.append("|" + " --- |" * (2 + 3 * len(names) + bool(ratio)))
    for load in dict.fromkeys(one.load for one in figures):
        newest = {one.server: one for one in figures if one.load == load}
        cells = [_cells(newest.get(name)) for name in names]
        prompt = next(iter(newest.values())).prompt_tokens
        line = f"| {load.concurrency} | {prompt:.0f} | {' | '.join(cells)} |"
        if ratio and len(newest) == 2:
            first, second = (newest[name].tokens_per_second for name in names)
            line += f" {first / second:.2f} |"
        lines.append(line)
    return "\n".join(lines)


def _stream(
    url: str, streams: int, load: Load, system: str, seed: int, begin: float
) -> list[Record]:
    """Runs one share of a load's streams, in a process of its own."""
    rng = random.Random(seed)
    if url.startswith(GRPC):
        return asyncio.run(_run_grpc(url.removeprefix(GRPC), streams, load, rng, begin))
    return asyncio.run(_run(url, streams, load, system, rng, begin))


async def _run(
    url: str, streams: int, load: Load, system: str, rng: random.Random, begin: float
) -> list[Record]:
    client = HttpClient(url, {})
    try:
        peer = await peers.discover(client, "openai-chat" if system else "openai")

        def request() -> tuple[Prompt, bytes]:
            prompt = Prompt(_words(rng, load.prompt_words))
            return prompt, _body(peer, prompt, load)

        generator = LoadGenerator(client, peer, request)
        await asyncio.sleep(max(0.0, begin - time.time()))
        if not system:
            stage = Stage(streams * load.requests, max_concurrency=streams)
            return (await generator.run(stage)).records
        start = time.perf_counter()
        talks = [
            _conversation(client, peer, load, system, random.Random(rng.random()), start)
            for _ in range(streams)
        ]
        return list(itertools.chain.from_iterable(await asyncio.gather(*talks)))
    finally:
        client.close()


async def _conversation(
    client: HttpClient, peer: peers.Peer, load: Load, system: str, rng: random.Random, start: float
) -> list[Record]:
    """Runs one conversation, to its end or to the first turn that fails.

    A record's index is its turn.
    """
    said: list[Message] = [{"role": "system", "content": system}]
    records: list[Record] = []
    for turn in range(load.requests):
        said.append({"role": "user", "content": _words(rng, load.prompt_words)})
        body = _body(peer, Prompt("", tuple(said)), load)
        record = await send(client, peer, turn, time.perf_counter() - start, body, start)
        records.append(record)
        if not record.ok:
            break
        said.append({"role": "assistant", "content": record.text})
    return records


async def _run_grpc(
    address: str, streams: int, load: Load, rng: random.Random, begin: float
) -> list[Record]:
    """Runs the streams as calls of Foredraft's own API, on one connection."""
    sampling = inference_pb2.SamplingParams(
        max_new_tokens=load.output_tokens, temperature=0.0, ignore_eos=True
    )
    requests = [
        inference_pb2.GenerateRequest(text=_words(rng, load.prompt_words), sampling=sampling)
        for _ in range(streams * load.requests)
    ]
    async with aio_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            await asyncio.wait_for(channel.channel_ready(), CONNECT_SECONDS)
        except TimeoutError:
            raise ConfigError(f"it does not answer within {CONNECT_SECONDS:g} s") from None
        await asyncio.sleep(max(0.0, begin - time.time()))
        start, waiting, records = time.perf_counter(), iter(enumerate(requests)), []

        async def stream() -> None:
            for index, request in waiting:
                records.append(await _call(stub, index, request, start))

        await asyncio.gather(*(stream() for _ in range(streams)))
        return records


async def _call(
    stub: inference_pb2_grpc.InferenceServiceStub,
    index: int,
    request: inference_pb2.GenerateRequest,
    start: float,
) -> Record:
    sent = time.perf_counter() - start
    record = Record(index, sent, sent, exact=True)
    try:
        async for chunk in stub.Generate(request):
            if chunk.tokens:
                record.arrivals.append((time.perf_counter() - start, len(chunk.tokens)))
            if chunk.HasField("completion"):
                record.prompt_tokens = chunk.completion.prompt_tokens
                record.cached_tokens = chunk.completion.cached_tokens
                record.output_tokens = chunk.completion.completion_tokens
    except grpc.aio.AioRpcError as error:
        record.error, record.detail = error.code().name, error.details() or ""
    record.end = time.perf_counter() - start
    return record


def _words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=7)) for _ in range(count))


def _body(peer: peers.Peer, prompt: Prompt, load: Load) -> bytes:
    return peer.body(prompt, load.output_tokens, 0.0, ignore_eos=True, extra={})


def _gaps(records: list[Record]) -> Iterator[float]:
    """Yields seconds between reads that brought tokens, as a user would see them."""
    for record in records:
        times = [when for when, _ in record.arrivals]
        yield from (after - before for before, after in itertools.pairwise(times))


def _cells(one: Figures | None) -> str:
    if one is None:
        return " | | "
    return (
        f"{one.tokens_per_second:,.0f} | {one.ttft_p50:.0f}, {one.ttft_max:.0f} | "
        f"{one.gap_p50:.1f}, {one.gap_p99:.1f}"
    )


def _line(one: Figures) -> str:
    return (
        f"{one.server} c={one.load.concurrency} prompt={one.prompt_tokens:.0f}:"
        f" {one.tokens_per_second:.0f} tokens/s, TTFT p50 {one.ttft_p50:.0f} max {one.ttft_max:.0f}"
        f" ms, gaps p50 {one.gap_p50:.1f} p99 {one.gap_p99:.1f} ms, {one.cached_tokens:.0f} cached"
        + (f", TTFT p50 of later turns {one.later_ttft_p50:.0f} ms" if one.later_ttft_p50 else "")
        + f", {one.failed} FAILED" * (one.failed > 0)
    )


def _from_json(fields: dict[str, object]) -> Figures:
    load = fields.pop("load")
    assert isinstance(load, dict)
    return Figures(load=Load(**load), **fields)  # type: ignore[arg-type]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=3, help="of each stream [3]")
    parser.add_argument("--prompt-words", type=int, default=100, help="of seven letters [100]")
    parser.add_argument(
        "--system-words",
        type=int,
        default=0,
        help="of conversations, shared by all; 0 for none [0]",
    )
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--processes", type=int, default=8, help="of the client [8]")
    parser.add_argument("--append", type=Path, help="JSON lines: earlier runs join the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
