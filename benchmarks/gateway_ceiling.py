"""Measures what one gateway process can stream: its processor time for each chunk, and so its
chunks/s on a core of its own.

    python -m benchmarks.gateway_ceiling --front completions chat grpc --streams 8 32 128 256

The real gateway process stands before a verifier that computes nothing: it gives every running
request its next token in one message a step, like the real one, and as many steps a second as
--chunks-per-second asks for over all streams. Clients run in processes of their own and count
events. Processor time (user and system, from /proc) depends less on what else the machine does than
wall-clock time. A run whose answers end with their first chunk is taken off, so requests are not
counted as chunks. The ceiling is the inverse: chunks/s at which the process takes a whole core.
Chunks that wait while the gateway is late are sent together, which costs less; "tokens in a chunk"
tells.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import httpx
import uvloop

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.api.verify.v1 import verify_pb2, verify_pb2_grpc
from foredraft.bench.http_client import HttpClient
from testing import stack as stacks
from testing import tiny_tokenizers
from testing.chaos import processes

VOCABULARY = 600
FRONTS = ("completions", "chat", "grpc")


@dataclass(frozen=True, slots=True)
class Load:
    """Describes one run.

    Attributes:
        front: Name of the protocol, one of FRONTS.
        streams: Number of requests that run together.
        chunks: Number of chunks of each answer.
    """

    front: str
    streams: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Cost of a load; processor times in microseconds.

    Attributes:
        tokens_in_a_chunk: Mean tokens of a chunk; more than 1 where the gateway was late.
        microseconds: The gateway's processor time for each chunk after a request's first.
        ceiling: Chunks per second at which the gateway takes a whole core.
    """

    load: Load
    chunks_per_second: float
    tokens_in_a_chunk: float
    microseconds: float
    ceiling: float


def main() -> int:
    args = _parser().parse_args()
    context = multiprocessing.get_context("spawn")
    found: list[Figures] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        _verifier(Path(folder), args.chunks_per_second) as address,
        stacks.running_gateway(address, log_level="warning") as (url, rpc),
        ProcessPoolExecutor(args.clients, mp_context=context) as pool,
    ):
        pid = stacks.gateway_processes[-1].pid
        stacks.eventually(lambda: httpx.get(f"{url}/health").status_code == 200)
        for front in args.front:
            where = rpc if front == "grpc" else url
            for streams in args.streams:
                each = max(2, round(args.seconds * args.chunks_per_second / streams))
                load = Load(front, streams, each)
                found.append(measure(pool, args.clients, pid, where, load))
                print(_row(found[-1]), flush=True)
    print("\n" + table(found))
    if args.out:
        args.out.write_text("".join(json.dumps(asdict(one)) + "\n" for one in found))
    return 0


def measure(pool: ProcessPoolExecutor, clients: int, pid: int, where: str, load: Load) -> Figures:
    """Runs a load on a gateway, its process given by its id."""
    short = Load(load.front, load.streams, 1)
    _run(pool, clients, pid, where, short)
    first = _run(pool, clients, pid, where, short)
    whole = _run(pool, clients, pid, where, load)
    chunks = max(whole.chunks - first.chunks, 1)
    microseconds = (whole.cpu_seconds - first.cpu_seconds) / chunks * 1e6
    return Figures(
        load,
        chunks_per_second=whole.chunks / whole.seconds,
        tokens_in_a_chunk=load.streams * load.chunks / whole.chunks,
        microseconds=microseconds,
        ceiling=1e6 / microseconds,
    )


def table(found: list[Figures]) -> str:
    """Returns a Markdown table with a row for each load."""
    head = "| front | streams | chunks/s | tokens in a chunk | CPU us a chunk | chunks/s a core |"
    return "\n".join([head, "| --- |" + " ---: |" * 5, *map(_row, found)])


def _row(one: Figures) -> str:
    return (
        f"| {one.load.front} | {one.load.streams} | {one.chunks_per_second:,.0f} "
        f"| {one.tokens_in_a_chunk:.2f} | {one.microseconds:.1f} | {one.ceiling:,.0f} |"
    )


@dataclass(slots=True)
class _Run:
    chunks: int
    seconds: float
    cpu_seconds: float


def _run(pool: ProcessPoolExecutor, clients: int, pid: int, where: str, load: Load) -> _Run:
    shares = [load.streams // clients + (i < load.streams % clients) for i in range(clients)]
    cpu, start = processes.cpu_seconds(pid), time.perf_counter()
    running = [pool.submit(_client, where, share, load) for share in shares if share]
    chunks = sum(future.result() for future in running)
    seconds = time.perf_counter() - start
    return _Run(chunks, seconds, processes.cpu_seconds(pid) - cpu)


def _client(where: str, streams: int, load: Load) -> int:
    """Runs one share of the streams, in a process of its own; returns the number of chunks."""
    return uvloop.run((_grpc if load.front == "grpc" else _http)(where, streams, load))


async def _http(url: str, streams: int, load: Load) -> int:
    client = HttpClient(url)
    path = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}[load.front]
    asked = (
        {"messages": [{"role": "user", "content": "x"}]}
        if load.front == "chat"
        else {"prompt": "x"}
    )
    body = {**asked, "stream": True, "max_tokens": load.chunks, "ignore_eos": True}
    num_events = 0

    def count(_now: float, data: bytes) -> None:
        nonlocal num_events
        num_events += data.count(b"data: {")

    encoded = json.dumps(body).encode()
    answers = await asyncio.gather(*(client.post(path, encoded, count) for _ in range(streams)))
    client.close()
    wrong = [answer for answer in answers if answer.status != 200]
    if wrong:
        raise SystemExit(f"{wrong[0].status}: {wrong[0].body!r}")
    return num_events


async def _grpc(address: str, streams: int, load: Load) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(text="x")
        request.sampling.max_new_tokens = load.chunks
        request.sampling.ignore_eos = True

        async def one() -> int:
            num_chunks = 0
            async for _ in stub.Generate(request):
                num_chunks += 1
            return num_chunks

        return sum(await asyncio.gather(*(one() for _ in range(streams))))


class _Verifier(verify_pb2_grpc.VerifyServiceServicer):
    """Gives every request its next token, step by step, at a rate.

    Args:
        model: Directory of the tokenizer.
        chunks_per_second: Over all requests.
    """

    def __init__(self, model: Path, chunks_per_second: float) -> None:
        self._info = verify_pb2.GetModelInfoResponse(
            model="paced",
            model_path=str(model),
            vocab_size=VOCABULARY,
            context_length=1 << 20,
            kv_tokens=1 << 24,
            speculative_algorithm="NONE",
        )
        self._rate = chunks_per_second

    async def GetModelInfo(
        self, request: verify_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> verify_pb2.GetModelInfoResponse:
        return self._info

    async def Run(
        self, requests: AsyncIterator[verify_pb2.RunRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[verify_pb2.RunResponse]:
        left: dict[int, int] = {}  # tokens that each request still gets
        reader = asyncio.create_task(self._read(requests, left))
        due = time.perf_counter()
        try:
            while True:
                due = max(due + max(len(left), 1) / self._rate, time.perf_counter() - 0.05)
                await asyncio.sleep(due - time.perf_counter())
                if left:
                    yield self._step(left)
        finally:
            reader.cancel()

    @staticmethod
    async def _read(requests: AsyncIterator[verify_pb2.RunRequest], left: dict[int, int]) -> None:
        async for request in requests:
            if request.HasField("submit"):
                left[request.submit.id] = request.submit.sampling.max_new_tokens
            else:
                left.pop(request.cancel.id, None)

    def _step(self, left: dict[int, int]) -> verify_pb2.RunResponse:
        response = verify_pb2.RunResponse(load=verify_pb2.Load(running=len(left)))
        for id in list(left):
            output = response.outputs.add(id=id, tokens=[97 + id % 26])
            left[id] -= 1
            if not left[id]:
                del left[id]
                output.finish.reason = verify_pb2.FINISH_REASON_LENGTH
        return response


@contextmanager
def _verifier(folder: Path, chunks_per_second: float) -> Iterator[str]:
    """Runs a verifier in a process of its own; yields its address."""
    tiny_tokenizers.save(tiny_tokenizers.byte_level(VOCABULARY), folder / "model")
    address = f"unix:{folder}/verify.sock"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(folder / "model", address, chunks_per_second, theirs)
    )
    process.start()
    ours.recv()
    try:
        yield address
    finally:
        ours.send(None)
        process.join()


def _serve(model: Path, address: str, chunks_per_second: float, pipe: Connection) -> None:
    async def run() -> None:
        server = grpc.aio.server()
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(
            _Verifier(model, chunks_per_second), server
        )
        server.add_insecure_port(address)
        await server.start()
        pipe.send(None)
        await asyncio.to_thread(pipe.recv)
        await server.stop(0)

    uvloop.run(run())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--front", nargs="+", choices=FRONTS, default=list(FRONTS))
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32, 128, 256])
    parser.add_argument("--chunks-per-second", type=float, default=4000.0, help="over all [4000]")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load [5]")
    parser.add_argument("--clients", type=int, default=1, help="processes of the client [1]")
    parser.add_argument("--out", type=Path, help="JSON lines")
    return parser


if __name__ == "__main__":
    sys.exit(main())
