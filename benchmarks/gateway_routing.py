"""Routing over several verifiers: prefix hits of conversations, and throughput, with one verifier
and with two.

    python -m benchmarks.gateway_routing --conversations 24 --turns 4

Real gateways and verifiers on the bundled model. Conversations of several turns run side by side;
each turn sends all that was said before and a new question, as chat clients do. Three settings: one
verifier; two, with the gateway's prefix affinity; two, by load alone (the gateway's router made
blind), to show what affinity is worth. Prefix hits are the prompt tokens that were found in a
verifier's cache over all prompt tokens of the second and later turns. Prints a table, writes JSON
and a plot.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.model_paths import model_directory
from benchmarks.results_folder import results_folder
from foredraft.bench import plots, prompts
from foredraft.bench.http_client import HttpClient
from testing import verifier_processes as processes
from testing.stack import eventually

ROUTE = "/v1/chat/completions"
# A block that no prompt fills: the router knows no prefix then.
BLIND = (
    "import gateway.routing as r, gateway.__main__ as m, sys; r.BLOCK_TOKENS = 1 << 40;"
    " sys.exit(m.main())"
)


@dataclass(slots=True)
class Turn:
    """A request of a conversation."""

    number: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float


@dataclass(slots=True)
class Result:
    """Results of one setting.

    Attributes:
        routed: Number of requests by the router's reason.
    """

    name: str
    verifiers: int
    seconds: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    routed: dict[str, float] = field(default_factory=dict)

    def hit_rate(self, first: int = 2) -> float:
        """Cached over all prompt tokens, of this and later turns."""
        late = [turn for turn in self.turns if turn.number >= first]
        return sum(turn.cached_tokens for turn in late) / sum(turn.prompt_tokens for turn in late)

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(turn.output_tokens for turn in self.turns) / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-path", default="foredraft-demo")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--side-by-side", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    if args.turns < 2:
        parser.error("--turns must be at least 2: a first turn finds nothing in a cache")
    model = model_directory(args.model_path)
    results = [
        measure(model, name, verifiers, blind, args)
        for name, verifiers, blind in (
            ("one verifier", 1, False),
            ("two, by prefix", 2, False),
            ("two, by load alone", 2, True),
        )
    ]
    _report(results, args)
    return int(any(result.errors for result in results))


def measure(
    model: Path, name: str, verifiers: int, blind: bool, args: argparse.Namespace
) -> Result:
    """Runs one setting on verifiers with empty caches."""
    result = Result(name, verifiers)
    with ExitStack() as stack:
        sockets = stack.enter_context(tempfile.TemporaryDirectory())
        places = [f"unix:{sockets}/{number}" for number in range(verifiers)]
        for place in places:
            stack.enter_context(
                processes.verifier(model, place, max_total_tokens=32_768, log_level="error")
            )
        program = ("-c", BLIND) if blind else ("-m", "gateway")
        flags = {"log_level": "error", "program": program}
        _, url, _ = stack.enter_context(processes.gateway(places, **flags))
        eventually(lambda: processes.usable(url) == verifiers, 300)
        uvloop.run(_run(url, result, args))
        for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
            if line.startswith("foredraft_gateway_routed_requests_total{"):
                result.routed[line.split('"')[1]] = float(line.rpartition(" ")[2])
    return result


async def _run(url: str, result: Result, args: argparse.Namespace) -> None:
    client = HttpClient(url)
    waiting = list(range(args.conversations))
    started = time.perf_counter()

    async def converse() -> None:
        while waiting:
            await _conversation(client, waiting.pop(0), result, args)

    await asyncio.gather(*(converse() for _ in range(args.side_by_side)))
    result.seconds = time.perf_counter() - started
    client.close()


async def _conversation(
    client: HttpClient, number: int, result: Result, args: argparse.Namespace
) -> None:
    draw = random.Random(number)
    messages: list[dict[str, str]] = []
    for turn in range(1, args.turns + 1):
        question = " ".join(draw.choices(prompts.WORDS, k=draw.randrange(30, 90)))
        messages.append({"role": "user", "content": f"{question}?"})
        body: dict[str, Any] = {
            "messages": messages,
            "max_tokens": args.tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        began = time.perf_counter()
        response = await client.post(ROUTE, json.dumps(body).encode())
        if response.status != 200:
            result.errors.append(f"{response.status} {response.body[:200]!r}")
            return
        answer = response.json()
        usage = answer["usage"]
        result.turns.append(
            Turn(
                turn,
                usage["prompt_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"],
                usage["completion_tokens"],
                time.perf_counter() - began,
            )
        )
        messages.append(answer["choices"][0]["message"])
        # People read before they answer; the load moves meanwhile.
        await asyncio.sleep(draw.random() * 0.5)


def _report(results: list[Result], args: argparse.Namespace) -> None:
    one = results[0]
    print(
        f"{args.conversations} conversations of {args.turns} turns, {args.side_by_side} side by"
        f" side, {args.tokens} tokens an answer; {os.cpu_count()} cores, load average"
        f" {os.getloadavg()[0]:.1f}\n"
    )
    print("| setting | requests | errors | prefix hits | of one verifier's | tokens/s | routed |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for result in results:
        routed = ", ".join(f"{name} {count:.0f}" for name, count in sorted(result.routed.items()))
        print(
            f"| {result.name} | {len(result.turns)} | {len(result.errors)} |"
            f" {result.hit_rate():.1%} | {result.hit_rate() / one.hit_rate():.1%} |"
            f" {result.rate:.1f} | {routed} |"
        )
    record = {
        "command": " ".join(["python -m benchmarks.gateway_routing", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "settings": [
            {
                "name": result.name,
                "verifiers": result.verifiers,
                "errors": result.errors,
                "hit_rate": result.hit_rate(),
                "hit_rate_to_one": result.hit_rate() / one.hit_rate(),
                "tokens_per_second": result.rate,
                "seconds": result.seconds,
                "routed": result.routed,
                "turns": [asdict(turn) for turn in result.turns],
            }
            for result in results
        ],
    }
    (args.out / "gateway_routing.json").write_text(json.dumps(record, indent=1) + "\n")
    _draw(results, args.out / "gateway_routing.png")


def _draw(results: list[Result], path: Path) -> None:
    pyplot = plots.pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for result in results:
        cached: Counter[int] = Counter()
        all_tokens: Counter[int] = Counter()
        for turn in result.turns:
            cached[turn.number] += turn.cached_tokens
            all_tokens[turn.number] += turn.prompt_tokens
        turns = sorted(all_tokens)
        rates = [cached[turn] / all_tokens[turn] for turn in turns]
        # Two of the curves may be one.
        width = 5 if result is results[0] else 1.5
        axes.plot(turns, rates, marker="o", linewidth=width, label=result.name)
    axes.set(xlabel="turn", ylabel="prompt tokens found in the cache", ylim=(0, 1), xticks=turns)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
