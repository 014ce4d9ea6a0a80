"""`foredraft bench serve`: loads a server and shows its latencies.

Flags are named as in SGLang's and vLLM's benchmarks.
"""

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from tqdm import tqdm

from foredraft.bench import arrivals, datasets, peers, plots, ranks, report
from foredraft.bench.http_client import HttpClient
from foredraft.bench.load import LoadGenerator, Stage, StageResult
from foredraft.bench.records import Objective, Record
from foredraft.bench.statistics import Summary, summarize
from foredraft.config.flag_parser import FlagParser
from foredraft.errors import ConfigError

DESCRIPTION = """\
Loads a running server and reports throughput, percentiles of the time to first token, between tokens and to the end,
goodput under an objective, and the accept length where the server tells it. Works with every server that has OpenAI's
API; what this client itself costs is printed beside.
"""  # noqa: E501
EXAMPLES = """\
examples:
  foredraft bench serve --num-prompts 100 --max-concurrency 8
      closed loop: eight clients, each sends its next request when the last one is answered
  foredraft bench serve --num-prompts 200 --request-rate 2 4 8 --goodput ttft:500 tpot:50
      open loop: Poisson arrivals at three rates in turn, requests within the objective
  foredraft bench serve --num-prompts 300 --ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 10
      a rate that grows
  foredraft bench serve --base-url http://peer:8000 --backend openai-chat --dataset-name custom --dataset-path prompts.jsonl
      another server, prompts of your own
"""  # noqa: E501


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 if no request was answered, 2 for a wrong flag or no server."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        stages = make_stages(arguments)
        objective = Objective.parse(arguments.goodput) if arguments.goodput else None
        if arguments.plot:
            plots.check(arguments.plot)
        if arguments.output_file:
            report.check_folder("--output-file", arguments.output_file)
        return uvloop.run(_bench(arguments, stages, objective))
    except ConfigError as error:
        print(f"foredraft bench serve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all flags."""
    parser = FlagParser(
        prog="foredraft bench serve",
        usage="foredraft bench serve [flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", default="", help="http://host:port; instead of host and port")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=30000)
    server.add_argument(
        "--backend",
        default="openai",
        choices=[*peers.ROUTES, *peers.ALIASES],
        help=(
            "route and shape of requests: openai (/v1/completions), openai-chat, native"
            " (/generate); the other names are those of SGLang's and vLLM's benchmarks for these"
            " [openai]"
        ),
    )
    server.add_argument("--model", default="", help="name to ask for [the server's first]")
    server.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=(
            "sent with every request, several times; 'Authorization=Bearer KEY' is a key"
            " [that in OPENAI_API_KEY]"
        ),
    )
    server.add_argument("--timeout", type=float, default=600.0, help="seconds for an answer [600]")
    datasets.add_arguments(parser.add_argument_group("prompts"))
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=int, default=100, help="requests of each load [100]")
    load.add_argument(
        "--request-rate",
        type=float,
        nargs="+",
        default=[math.inf],
        metavar="RATE",
        help=(
            "requests per second, sent by the clock; several rates are run in turn; inf: as fast as"
            " --max-concurrency lets them, or all at once [inf]"
        ),
    )
    load.add_argument(
        "--max-concurrency",
        type=int,
        nargs="+",
        default=[None],
        metavar="N",
        help="requests at the server at most; several values are run in turn",
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="of arrivals: 1 is Poisson, below 1 burstier [1]",
    )
    load.add_argument("--ramp-up-strategy", choices=arrivals.RAMPS, help="grow the request rate")
    load.add_argument("--ramp-up-start-rps", type=float, metavar="RATE")
    load.add_argument("--ramp-up-end-rps", type=float, metavar="RATE")
    load.add_argument("--warmup-requests", type=int, default=1, help="sent before, not counted [1]")
    load.add_argument(
        "--flush-cache", action="store_true", help="empty the prefix cache before each load"
    )
    load.add_argument("--seed", type=int, default=1, help="of prompts and arrivals [1]")
    results = parser.add_argument_group("results")
    results.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help=(
            "count requests within ttft:MS, tpot:MS (mean time per token behind the first), e2el:MS"
        ),
    )
    results.add_argument("--output-file", type=Path, help="append a JSON line for each load")
    results.add_argument("--output-details", action="store_true", help="with every request in it")
    results.add_argument("--plot", type=Path, help="write a picture (extra: plots)")
    results.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


def make_stages(arguments: argparse.Namespace) -> list[Stage]:
    """Returns the loads that the flags select, in order.

    Raises:
        ConfigError: A flag has no sense.
    """
    if arguments.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, not {arguments.num_prompts}")
    if arguments.warmup_requests < 0:
        raise ConfigError(f"--warmup-requests must be at least 0, not {arguments.warmup_requests}")
    if not arguments.timeout > 0:
        raise ConfigError(f"--timeout must be above 0, not {arguments.timeout}")
    if not arguments.burstiness > 0:
        raise ConfigError(f"--burstiness must be above 0, not {arguments.burstiness}")
    for rate in arguments.request_rate:
        if not rate > 0:
            raise ConfigError(f"--request-rate must be above 0, not {rate}")
    for limit in arguments.max_concurrency:
        if limit is not None and limit < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, not {limit}")
    ramp = _ramp(arguments)
    return [
        Stage(
            arguments.num_prompts,
            rate,
            limit,
            ramp,
            arguments.burstiness,
            arguments.seed,
        )
        for limit in arguments.max_concurrency
        for rate in arguments.request_rate
    ]


def _ramp(arguments: argparse.Namespace) -> arrivals.Ramp | None:
    strategy, start, end = (
        arguments.ramp_up_strategy,
        arguments.ramp_up_start_rps,
        arguments.ramp_up_end_rps,
    )
    if strategy is None:
        if start is not None or end is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if start is None or end is None:
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if arguments.request_rate != [math.inf]:
        raise ConfigError("--ramp-up-strategy takes the place of --request-rate: give one")
    if not (end > 0 and (start > 0 or (start == 0 and strategy == "linear"))):
        raise ConfigError("the rates of a ramp must be above 0; a linear one may start at 0")
    return arrivals.Ramp(strategy, start, end)


async def _bench(
    arguments: argparse.Namespace, stages: Sequence[Stage], objective: Objective | None
) -> int:
    console = report.make_console()
    url = arguments.base_url or f"http://{arguments.host}:{arguments.port}"
    url = url.rstrip("/").removesuffix("/v1")  # OpenAI's clients are given the address with it
    client = HttpClient(url, _headers(arguments.header))
    try:
        peer = await peers.discover(client, arguments.backend, arguments.model)
        requests = await datasets.Requests.make(client, peer, arguments)
        await _warm_up(client, peer, requests, arguments)
        console.print(
            f"{peer.model or 'the model'} at {url}{peer.path} ({peer.kind or 'unknown server'}), "
            f"prompts: {requests.description}",
            soft_wrap=True,
        )
        results, summaries = [], []
        for stage in stages:
            if arguments.flush_cache:
                await client.post("/flush_cache", b"")
            ranks_before = await ranks.read(client)
            result, summary = await _run_stage(client, peer, requests, arguments, stage, objective)
            ranks_after = await ranks.read(client) if ranks_before else None
            rank_times = ranks_after.since(ranks_before) if ranks_before and ranks_after else {}
            results.append(result)
            summaries.append(summary)
            console.rule(stage.name)
            report.print_stage(console, summary, objective, requests.is_alike)
            if rank_times:
                console.print(ranks.lines(rank_times))
            _print_failures(console, result)
            if arguments.output_file:
                setting = _setting(arguments, peer, url, stage)
                if rank_times:
                    setting["rank_step_ms"] = rank_times
                report.append_json(
                    arguments.output_file, setting, summary, result, arguments.output_details
                )
        if len(summaries) > 1:
            console.print(report.comparison(summaries))
        if requests.source.repeats:
            console.print("NOTE: prompts were used more than once; caches and n-grams gain by that")
        if arguments.plot:
            plots.draw_load(arguments.plot, results, summaries)
            console.print(f"wrote {arguments.plot}")
    finally:
        client.close()
    return 0 if any(summary.num_ok for summary in summaries) else 1


async def _warm_up(
    client: HttpClient, peer: peers.Peer, requests: datasets.Requests, arguments: argparse.Namespace
) -> None:
    if arguments.warmup_requests < 1:
        return
    generator = LoadGenerator(client, peer, requests.next, timeout=arguments.timeout)
    result = await generator.run(Stage(arguments.warmup_requests, max_concurrency=1))
    for record in result.records:
        if not record.ok:
            raise ConfigError(f"the server cannot be measured: {record.error}: {record.detail}")


async def _run_stage(
    client: HttpClient,
    peer: peers.Peer,
    requests: datasets.Requests,
    arguments: argparse.Namespace,
    stage: Stage,
    objective: Objective | None,
) -> tuple[StageResult, Summary]:
    before = await peers.spoken_of(client)
    with tqdm(
        total=stage.num_requests,
        desc=stage.name,
        unit=" requests",
        disable=True if arguments.disable_tqdm else None,
        dynamic_ncols=True,
    ) as bar:
        started, tokens, failed = time.monotonic(), 0, 0

        def on_done(record: Record) -> None:
            nonlocal tokens, failed
            tokens += record.output_tokens
            failed += not record.ok
            rate = tokens / max(time.monotonic() - started, 1e-3)
            bar.set_postfix_str(f"{rate:.0f} tokens/s" + f", {failed} failed" * (failed > 0), False)
            bar.update()

        generator = LoadGenerator(
            client, peer, requests.next, timeout=arguments.timeout, on_done=on_done
        )
        result = await generator.run(stage)
    after = await peers.spoken_of(client) if before else None
    return result, summarize(result, objective, (before, after))


def _print_failures(console: Console, result: StageResult) -> None:
    shown = {(record.error, record.detail) for record in result.records if record.error}
    for error, detail in sorted(shown)[:3]:
        console.print(f"  {error}: {detail}"[:300], markup=False, soft_wrap=True)


def _setting(
    arguments: argparse.Namespace, peer: peers.Peer, url: str, stage: Stage
) -> dict[str, Any]:
    return {
        "backend": peer.backend,
        "server": peer.kind,
        "base_url": url,
        "model": peer.model,
        "dataset_name": arguments.dataset_name,
        "request_rate": "inf" if math.isinf(stage.rate) else stage.rate,
        "max_concurrency": stage.max_concurrency,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client_machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "client_load_average": os.getloadavg()[0],
    }


def _headers(given: Sequence[str]) -> dict[str, str]:
    headers = {}
    for pair in given:
        name, separator, value = pair.partition("=")
        if not separator or not pair.isascii() or any(c in pair for c in "\r\n"):
            # What was given may be a key in another form, which is not for logs.
            raise ConfigError("--header takes NAME=VALUE, ASCII and one line")
        headers[name] = value
    if any(name.lower() == "authorization" for name in headers):
        return headers
    return headers | peers.key_header()
