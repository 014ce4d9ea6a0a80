"""`foredraft bench speculative`: tries algorithms and trees on a model, each on a stack of its own,
and prints the best flags.
"""

import argparse
import hashlib
import math
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from foredraft.bench import peers, plots, prompts, report, sweep
from foredraft.bench.http_client import HttpClient
from foredraft.bench.load import LoadGenerator, Stage
from foredraft.bench.prompts import Prompt
from foredraft.bench.statistics import summarize
from foredraft.bench.sweep import Case, Figures, Results, Setting
from foredraft.cli.sweep_servers import RunningServer, Servers, StartedServers
from foredraft.config.algorithms import ALGORITHMS
from foredraft.config.flag_parser import FlagParser
from foredraft.config.options import flag_of
from foredraft.errors import ConfigError

DESCRIPTION = """\
Measures plain decoding and each algorithm with each tree on a model, at several batch sizes and temperatures, and
prints which flags to serve it with. Each setting gets services of its own, or, with --base-url, is asked of a running
server request by request. Results are kept in a file after each case: the same command goes on where it was stopped.
"""  # noqa: E501
EXAMPLES = """\
examples:
  foredraft bench speculative
      the bundled model and its heads: a few minutes on a CPU
  foredraft bench speculative --model-path Qwen3-8B --draft EAGLE3=Qwen3-8B-eagle3 --draft STANDALONE=Qwen3-0.6B \\
      --steps 3 5 7 --topk 1 4 8 --num-draft-tokens 8 16 32 --batch-size 1 8 32 -- --device cuda
      a model of yours; what follows -- are flags of foredraft serve
  foredraft bench speculative --base-url http://127.0.0.1:30000
      smaller trees than those of a running server
"""  # noqa: E501
_STEADY = 0.1
_AT_LEAST_ONE = (
    "steps",
    "topk",
    "batch_size",
    "num_draft_tokens",
    "output_len",
    "repeats",
    "num_prompts",
)


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 if nothing could be measured, 2 for a wrong flag."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        return _sweep(arguments)
    except ConfigError as error:
        print(f"foredraft bench speculative: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all flags."""
    parser = FlagParser(
        prog="foredraft bench speculative",
        usage="foredraft bench speculative [flags] [-- flags of foredraft serve]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-path", default="foredraft-demo", help="[foredraft-demo]")
    parser.add_argument("--base-url", default="", help="use this running server instead")
    parser.add_argument(
        "--draft",
        action="append",
        default=[],
        metavar="ALGORITHM=PATH",
        help=(
            "draft model of STANDALONE, or head of any other algorithm but NGRAM; several times"
            " [those of the bundled model]"
        ),
    )
    parser.add_argument(
        "--algorithm",
        nargs="+",
        default=None,
        choices=[name for name in ALGORITHMS if name != "NEXTN"],
        help="only these, beside plain decoding [NGRAM and all that have a --draft]",
    )
    ints: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
    parser.add_argument("--steps", default=[4], help="depths of the tree [4]", **ints)
    parser.add_argument("--topk", default=[1, 4], help="children per node [1 4]", **ints)
    parser.add_argument(
        "--num-draft-tokens",
        default=[8],
        help="rows that are verified, the root included [8]",
        **ints,
    )
    parser.add_argument("--batch-size", default=[1, 8], help="requests at a time [1 8]", **ints)
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="[0 1]"
    )
    parser.add_argument(
        "--dataset-path", type=Path, help="prompts, as in bench serve [small tasks]"
    )
    parser.add_argument("--num-prompts", type=int, default=8, help="at least, in each case [8]")
    parser.add_argument("--output-len", type=int, default=48, help="tokens of each answer [48]")
    parser.add_argument(
        "--repeats", type=int, default=1, help="of each case; their median counts [1]"
    )
    parser.add_argument("--seed", type=int, default=1, help="of prompts [1]")
    parser.add_argument(
        "--output-file", type=Path, default=None, help="results [bench-speculative-MODEL.json]"
    )
    parser.add_argument("--plot", type=Path, help="write heat maps (extra: plots)")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    parser.add_argument("serve_flags", nargs="*", help=argparse.SUPPRESS)
    return parser


def _sweep(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        plots.check(arguments.plot)
    for name in _AT_LEAST_ONE:
        given = getattr(arguments, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            raise ConfigError(f"{flag_of(name)}: must be at least 1")
    if not all(0 <= temperature < math.inf for temperature in arguments.temperature):
        raise ConfigError("--temperature: must be at least 0")
    console = report.make_console()
    servers: Servers = (
        RunningServer(arguments.base_url) if arguments.base_url else StartedServers(arguments)
    )
    settings = servers.settings(arguments)
    cases = [
        Case(batch, temperature)
        for temperature in arguments.temperature
        for batch in arguments.batch_size
    ]
    path = arguments.output_file or Path(f"bench-speculative-{servers.model}.json")
    report.check_folder("--output-file", path)
    results = Results.open(path, _conditions(arguments, servers, cases))
    known = sum(results.get(setting, case) is not None for setting in settings for case in cases)
    console.print(
        (
            f"{len(settings)} settings of {servers.model} in {len(cases)} cases; {known} known from"
            f" {path}"
            if known
            else (
                f"{len(settings)} settings of {servers.model} in {len(cases)} cases, kept in {path}"
            )
        ),
        soft_wrap=True,
    )
    measure = _Measure(arguments, servers, cases)
    with tqdm(
        total=(len(settings) + 1) * len(cases),
        initial=known,
        unit=" cases",
        disable=True if arguments.disable_tqdm else None,
        dynamic_ncols=True,
    ) as bar:
        for setting, case, figures in sweep.run(settings, cases, results, servers.open, measure):
            rate = "failed" if figures is None else f"{figures.output_rate:.0f} tokens/s"
            bar.set_postfix_str(f"{setting.name}, {case.name}: {rate}", False)
            bar.update()
    return _report(console, arguments, servers, settings, cases, results)


class _Measure:
    """Loads a server in one case.

    The prompts of a case are the same for every setting, and no other case's: an n-gram draft must
    not have seen the answers.
    """

    def __init__(
        self, arguments: argparse.Namespace, servers: Servers, cases: Sequence[Case]
    ) -> None:
        self._arguments = arguments
        self._servers = servers
        self._cases = cases

    def __call__(self, url: str, setting: Setting, case: Case) -> Figures:
        return uvloop.run(self._measure(url, setting, case))

    async def _measure(self, url: str, setting: Setting, case: Case) -> Figures:
        arguments = self._arguments
        client = HttpClient(url, self._servers.headers)
        try:
            peer = await peers.discover(client, "openai")
            source = self._source(case)

            def request() -> tuple[Prompt, bytes]:
                prompt = source.take()
                return prompt, peer.body(
                    prompt,
                    arguments.output_len,
                    case.temperature,
                    ignore_eos=True,
                    extra=setting.request_fields if self._servers.fields else {},
                )

            generator = LoadGenerator(client, peer, request)
            await generator.run(Stage(case.batch_size, max_concurrency=case.batch_size))
            count = sweep.num_requests(case.batch_size, arguments.num_prompts)
            found = []
            for _ in range(arguments.repeats):
                result = await generator.run(Stage(count, max_concurrency=case.batch_size))
                found.append(summarize(result))
            return Figures.of(found)
        finally:
            client.close()

    def _source(self, case: Case) -> prompts.PromptSource:
        path = self._arguments.dataset_path
        if path is not None:
            part = self._cases.index(case), len(self._cases)
            return prompts.from_file(path, self._arguments.seed, part)
        return prompts.tasks(
            int.from_bytes(
                hashlib.sha256(f"{self._arguments.seed}/{case.name}".encode()).digest()[:4]
            )
        )


def _report(
    console: Console,
    arguments: argparse.Namespace,
    servers: Servers,
    settings: Sequence[Setting],
    cases: Sequence[Case],
    results: Results,
) -> int:
    ranking = results.ranking(settings, cases)
    console.print(_table(settings, cases, results, dict(ranking)))
    _warn_of_drift(console, results, cases)
    for name, error in results.errors.items():
        console.print(f"{name} failed: {error}", soft_wrap=True, markup=False)
    if arguments.plot and results.found:
        plots.draw_sweep(arguments.plot, settings, cases, results)
        console.print(f"wrote {arguments.plot}")
    if not ranking or (len(settings) > 1 and len(ranking) == 1 and results.errors):
        console.print("nothing could be compared with plain decoding")
        return 1
    best, speedup = ranking[0]
    console.print(f"best over all cases, {speedup:.2f} times plain decoding (geometric mean):")
    console.print(f"  foredraft serve {servers.flags} {best.flags}", soft_wrap=True, markup=False)
    if others := sweep.equals(ranking):
        names = ", ".join(setting.name for setting in others)
        console.print(f"not to be told from it by this run: {names}", soft_wrap=True)
    for case in cases:
        first, rate = max(
            ((one, results.speedup(one, case) or 0.0) for one in settings), key=lambda pair: pair[1]
        )
        if first != best:
            console.print(f"{case.name} alone: {first.name}, {rate:.2f} times plain decoding")
    return 0


def _warn_of_drift(console: Console, results: Results, cases: Sequence[Case]) -> None:
    drift = results.drift(cases)
    if drift is None:
        return
    least, largest = drift
    console.print(
        f"plain decoding once more at the end: {least:.2f} to {largest:.2f} times as fast as at the"
        " beginning"
    )
    if not 1 - _STEADY <= least <= largest <= 1 + _STEADY:
        console.print(
            "WARNING: this machine was not quiet; settings that differ by less than that are not"
            " told apart",
            soft_wrap=True,
        )


def _table(
    settings: Sequence[Setting],
    cases: Sequence[Case],
    results: Results,
    means: dict[Setting, float],
) -> Table:
    table = Table(
        title="tokens/s (times plain decoding, accept length)", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("steps/topk/tokens", no_wrap=True)
    for case in cases:
        table.add_column(case.name, justify="right", no_wrap=True)
    table.add_column("mean", justify="right")
    for setting in settings:
        row = [setting.name]
        for case in cases:
            found, speedup = results.get(setting, case), results.speedup(setting, case)
            if found is None:
                row.append("failed" if setting.key in results.errors else "")
            else:
                ratio = "" if speedup is None else f"{speedup:.2f}, "
                row.append(f"{found.output_rate:.0f} ({ratio}{found.accept_length:.2f})")
        row.append(f"{means[setting]:.2f}" if setting in means else "")
        table.add_row(*row)
    return table


def _conditions(
    arguments: argparse.Namespace, servers: Servers, cases: Sequence[Case]
) -> dict[str, Any]:
    digest, of_file = "", {}
    if arguments.dataset_path is not None:
        # Read before anything starts, so that a missing or wrong file is reported at once.
        prompts.from_file(arguments.dataset_path, part=(0, len(cases)))
        digest = hashlib.sha256(arguments.dataset_path.read_bytes()).hexdigest()[:16]
        of_file = {"set of cases": [case.name for case in cases]}  # they share the prompts out
    return of_file | {
        "model": servers.model,
        "serve flags": servers.given,
        "prompts": digest or "tasks",
        "seed": arguments.seed,
        "number of prompts": arguments.num_prompts,
        "output length": arguments.output_len,
        "repeats": arguments.repeats,
        "machine": f"{platform.node()}, {os.cpu_count()} cores",
    }
