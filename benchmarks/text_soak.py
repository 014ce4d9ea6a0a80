"""Is every text plain decoding's?

First a stack without drafts answers a set of requests: greedy and seeded completions, chats, tools,
JSON schemas, regular expressions, penalties, stop strings, prefixes in common. Then a stack with
drafts gets them again and again, mixed, in any company, as streams and whole, some cut off by their
client, while its draft is killed now and then; and every answer is compared.

    python -m benchmarks.text_soak --minutes 8 -- --speculative-algorithm EAGLE3 \\
        --speculative-draft-model-path foredraft-demo-eagle3
    python -m benchmarks.text_soak --minutes 8 -- --device cuda --dtype bfloat16 --speculative-algorithm NGRAM

What follows `--` are flags of `foredraft serve`. Writes OUTPUT.json, and ends with 1 if an answer
was another.
"""  # noqa: E501

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from foredraft.bench.http_client import ConnectionBroken, HttpClient
from foredraft.cli import serve, serve_config, stack
from foredraft.cli.supervisor import Supervisor
from testing.compared_texts import Ask, Findings, answer_all, compare, requests

# A pool so small that prefixes are forgotten and requests preempt each other.
BOUNDS = {"max_total_tokens": 4096, "chunked_prefill_size": 96}
PATIENCE = {"draft_step_timeout": 20.0, "log_level": "warning"}
SHOWN = 20  # answers that were others, of the report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--requests", type=int, default=160, help="different ones")
    parser.add_argument("--kill-every", type=float, default=45.0, help="seconds; 0 for never")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/text_soak"))
    parser.add_argument("serve_flags", nargs="*", help="flags of foredraft serve, behind --")
    arguments = parser.parse_args()
    given = serve.read_values(serve.make_parser().parse_args(arguments.serve_flags))
    if not given.get("speculative_algorithm"):
        parser.error("--speculative-algorithm behind -- says what drafts")
    asks = list(requests(arguments.requests, arguments.seed))
    target = {name: given[name] for name in given if not _is_of_drafts(name)}
    with _running({**target, "speculative_algorithm": "NONE"}) as plain:
        plain.wait_healthy(timeout=600)
        uvloop.run(answer_all(plain.urls["http"], asks))
    found = Findings()
    with _running(given) as drafting:
        drafting.wait_healthy(timeout=600)
        uvloop.run(load(drafting, asks, found, arguments))
        restarts = sum(state.num_restarts for state in drafting.states())
    report = {
        "minutes": arguments.minutes,
        "serve_flags": given,
        "requests": len(asks),
        "compared": dict(sorted(found.compared.items())),
        "others": found.others[:SHOWN],
        "failures": found.failures[:SHOWN],
        "kills": found.kills,
        "restarts": restarts,
    }
    path = arguments.output.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    for kind, count in sorted(found.compared.items()):
        print(f"{count:7d}  {kind}")
    for other in found.others[:SHOWN]:
        print(json.dumps(other))
    print(*found.failures[:SHOWN], sep="\n")
    print(f"{found}, {restarts} restarts")
    return int(bool(found.others or found.failures))


def _is_of_drafts(name: str) -> bool:
    return name.startswith(("speculative_", "draft"))


def _running(given: dict[str, Any]) -> Supervisor:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    values = {"port": 0, "grpc_port": 0, **BOUNDS, **PATIENCE, **given}
    return stack.make_supervisor(
        serve_config.resolve_models(values), on_line=lambda name, line: None
    )


async def load(
    supervisor: Supervisor, asks: list[Ask], found: Findings, arguments: argparse.Namespace
) -> None:
    """Asks until the time is over, and kills the draft meanwhile."""
    end = time.monotonic() + 60 * arguments.minutes
    url = supervisor.urls["http"]

    async def client(number: int) -> None:
        choose = random.Random(f"{arguments.seed}/{number}")
        http = HttpClient(url)
        while time.monotonic() < end:
            ask = choose.choice(asks)
            try:
                async with asyncio.timeout(300):
                    await compare(http, ask, choose, found)
            except (ConnectionBroken, TimeoutError, ValueError, KeyError, IndexError) as error:
                found.failures.append(f"{ask.kind}: {type(error).__name__} {error}"[:400])
        http.close()

    async def killer() -> None:
        while time.monotonic() + arguments.kill_every < end:
            await asyncio.sleep(arguments.kill_every)
            for state in supervisor.states():
                if state.name.startswith("draft") and state.pid is not None:
                    os.kill(state.pid, signal.SIGKILL)
                    found.kills += 1

    async def reporter() -> None:
        while time.monotonic() + 60 < end:
            await asyncio.sleep(60)
            print(f"{(end - time.monotonic()) / 60:.0f} minutes left: {found}", flush=True)

    async with asyncio.TaskGroup() as group:
        for number in range(arguments.clients):
            group.create_task(client(number))
        group.create_task(reporter())
        if arguments.kill_every:
            group.create_task(killer())


if __name__ == "__main__":
    sys.exit(main())
