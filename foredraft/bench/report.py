"""Shows a load's figures: tables for people, JSON lines for programs."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from foredraft.bench.load import StageResult
from foredraft.bench.records import Objective, Record
from foredraft.bench.statistics import PERCENTILES, Summary
from foredraft.errors import ConfigError

# Above these limits the figures may be the client's own.
_BUSY_CLIENT = 0.5  # share of a core above which the client is reported as busy
_LATE_CLIENT = 0.02  # seconds, 99th percentile


def make_console() -> Console:
    """Creates a console; files and pipes get lines of 110 characters."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110)


def print_stage(
    console: Console, summary: Summary, objective: Objective | None, is_alike: bool = False
) -> None:
    """Prints one stage: counts and rates, a table of latencies, the client's own cost.

    Args:
        is_alike: Whether the prompts share text by themselves, or are the same with each seed: then
            a server's cache says nothing of the seed.
    """
    errors = ", ".join(f"{count} {kind}" for kind, count in summary.errors.items())
    lines = [
        f"{summary.num_ok} of {summary.num_sent} requests in {summary.seconds:.2f} s"
        + (f"; failed: {errors}" if errors else ""),
        (
            f"{summary.request_rate:.2f} requests/s, {summary.output_rate:.1f} output tokens/s, "
            f"{summary.concurrency:.1f} under way on average"
        ),
        _tokens(summary),
    ]
    if summary.accept_length is not None:
        rate = (
            ""
            if summary.accept_rate is None
            else f", {summary.accept_rate:.0%} of what was drafted"
        )
        lines.append(f"accept length {summary.accept_length:.2f} tokens per verification{rate}")
    if objective is not None and summary.goodput is not None:
        part = summary.good_requests / summary.num_sent if summary.good_requests else 0.0
        lines.append(f"goodput {summary.goodput:.2f} requests/s ({part:.0%} within the objective)")
    if summary.cached_tokens > 0.1 * summary.input_tokens and not is_alike:
        lines.append(
            "NOTE: prompts were in the server's cache already; another --seed gives prompts that it"
            " has not seen"
        )
    console.print("\n".join(lines), soft_wrap=True)
    console.print(latency_table(summary))
    console.print(client_line(summary), soft_wrap=True)


def _tokens(summary: Summary) -> str:
    output = f"{summary.output_tokens} output tokens"
    if summary.num_ok and not summary.is_counted:
        return f"{output}: the server counts none, so each event with text is taken for one"
    return (
        f"{summary.input_tokens} prompt tokens ({summary.cached_tokens} from the cache), {output}"
    )


def latency_table(summary: Summary) -> Table:
    """Returns a table of latencies in milliseconds by percentile."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("ms")
    for title in ("mean", *(f"p{point:g}" for point in PERCENTILES), "max"):
        table.add_column(title, justify="right")
    rows = (
        ("time to first token", summary.ttft),
        ("time per token of a request", summary.tpot),
        ("between tokens", summary.itl),
        ("whole answer", summary.e2el),
    )
    for title, found in rows:
        values = (found.mean, *found.percentiles.values(), found.max)
        table.add_row(title, *(f"{value * 1e3:.1f}" for value in values) if found.count else "")
    return table


def client_line(summary: Summary) -> str:
    """Returns a line about the client's cost, with a warning where it spoils the figures."""
    line = (
        f"client: {summary.cpu_share:.1%} of a core, {summary.cpu_per_token * 1e6:.0f} us per token"
    )
    late = summary.lag.percentiles[99.0]
    if summary.lag.count:
        line += f", sends at most {late * 1e3:.1f} ms late (p99)"
    if not summary.is_exact and summary.num_ok:
        line += "; the server does not say which tokens came when: apportioned by length of text"
    if summary.cpu_share > _BUSY_CLIENT or late > _LATE_CLIENT:
        line += "\nWARNING: the client may be the bottleneck: latencies are partly its own"
    return line


def comparison(summaries: Sequence[Summary]) -> Table:
    """Returns a table with one row for each stage."""
    table = Table(title="all loads", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("load", no_wrap=True)
    titles = ["ok", "req/s", "tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50", "p99"]
    has_goodput = any(summary.goodput is not None for summary in summaries)
    has_speculation = any(summary.accept_length is not None for summary in summaries)
    titles += ["goodput"] * has_goodput + ["accept"] * has_speculation
    for title in titles:
        table.add_column(title, justify="right")
    for summary in summaries:
        row = [str(summary.num_ok), f"{summary.request_rate:.2f}", f"{summary.output_rate:.1f}"]
        for found in (summary.ttft, summary.tpot, summary.e2el):
            row += [
                f"{found.percentiles[point] * 1e3:.0f}" if found.count else ""
                for point in (50.0, 99.0)
            ]
        if has_goodput:
            row.append(f"{summary.goodput or 0:.2f}")
        if has_speculation:
            row.append("" if summary.accept_length is None else f"{summary.accept_length:.2f}")
        table.add_row(summary.name, *row)
    return table


def details(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Returns all records of requests as columns in the order of sending; times in seconds from
    the stage's start.
    """
    return {
        "due": [record.due for record in records],
        "sent": [record.sent for record in records],
        "ttfts": [record.ttft for record in records],
        "latencies": [record.latency for record in records],
        "itls": [[[gap, count] for gap, count in record.gaps] for record in records],
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "errors": [f"{record.error} {record.detail}".strip() for record in records],
        "generated_texts": [record.text for record in records],
    }


def check_folder(flag: str, path: Path) -> None:
    """Raises ConfigError where a file cannot be made, before anything is measured for it."""
    if not path.parent.is_dir():
        raise ConfigError(f"{flag}: {path.parent} is no folder")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag}: {path} cannot be written")


def append_json(
    path: Path, setting: dict[str, Any], summary: Summary, result: StageResult, full: bool
) -> None:
    """Adds a line to a file of JSON lines."""
    told = {**setting, **summary.to_json()}
    if full:
        told |= details(result.records)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(told) + "\n")
