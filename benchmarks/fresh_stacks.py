"""The first requests of fresh servers by the default policy, beside always and never drafting.

    python -m benchmarks.fresh_stacks --stacks 5

A cell is a draft of the bundled family at a temperature. For each of its arms `foredraft serve` is
started anew, arms in turn, forwards and backwards; once the server says since when it drafts, it
gets 24 requests of 96 tokens, pieces of held-out code and prose, `--batch` of them at a time. An
arm's speed is the tokens of all requests over the seconds from the first to the last. The table
gives the default's speed over the better of always and never: the ratio of the means, and the
interval that holds nine of ten such ratios when stacks are drawn again from those measured. Never
drafting does not depend on the draft, so cells of one temperature share its stacks.

    python -m benchmarks.fresh_stacks --stacks 5 --at-once 20

On a machine of many cores: so many servers run side by side, each with its client on two cores of
its own.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

from benchmarks.first_requests import PLAIN, ask, fresh_server
from benchmarks.real_prompts import FILE
from benchmarks.results_folder import results_folder

CELL_DRAFTS = ("NGRAM", "EAGLE3", "MTP", "STANDALONE")
REQUESTS, TOKENS = 24, 96
LONGEST = 600  # characters of a prompt
DRAWS = 4000
CORES = 2  # of each server, where several run side by side
Arm = tuple[str, str, float]  # when it drafts, its draft, the temperature
Speeds = dict[str, list[float]]  # tokens per second of each stack, by "arm, draft, temperature"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--drafts", nargs="+", choices=CELL_DRAFTS, default=list(CELL_DRAFTS))
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--stacks", type=int, default=5, help="fresh servers of each arm [5]")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time [1]")
    parser.add_argument("--at-once", type=int, default=1, help="servers side by side [1]")
    parser.add_argument("--out", type=results_folder, default="benchmarks/results")
    args = parser.parse_args()
    if args.at_once > 1 and args.at_once * CORES > len(os.sched_getaffinity(0)):
        parser.error(f"--at-once: each server needs {CORES} cores of its own")
    arms: list[Arm] = [("never", PLAIN, temperature) for temperature in args.temperature]
    for draft in args.drafts:
        arms += [(arm, draft, t) for t in args.temperature for arm in ("default", "always")]
    speeds: Speeds = {}
    file = args.out / f"fresh_stacks_{args.batch}.json"
    with _pool(args.at_once) as pool:
        asked = [
            [pool.submit(_speed, *arm, args.batch) for arm in _turn(arms, number)]
            for number in range(args.stacks)
        ]
        for number, stack in enumerate(asked):
            for arm, speed in zip(_turn(arms, number), stack, strict=True):
                speeds.setdefault(_key(*arm), []).append(speed.result())
                print(f"{number + 1}: {_key(*arm)}: {speed.result():.1f}", flush=True)
            file.write_text(json.dumps(speeds, indent=1))
            print(_table(speeds, args.drafts, args.temperature), flush=True)
    print(f"wrote {file}")
    return 0


def _turn(arms: list[Arm], number: int) -> list[Arm]:
    """Returns the arms in the order of one stack: every other one goes backwards."""
    return arms if number % 2 == 0 else arms[::-1]


def _pool(at_once: int) -> ProcessPoolExecutor:
    """Returns processes that each measure one server at a time, on cores of their own if there are
    several.
    """
    spawn = multiprocessing.get_context("spawn")
    if at_once == 1:
        return ProcessPoolExecutor(1, spawn)
    cores = sorted(os.sched_getaffinity(0))
    free = spawn.Queue()
    for first in range(0, at_once * CORES, CORES):
        free.put(cores[first : first + CORES])
    return ProcessPoolExecutor(at_once, spawn, _take_cores, (free,))


def _take_cores(free: "multiprocessing.Queue[list[int]]") -> None:
    os.sched_setaffinity(0, free.get())


def _key(arm: str, draft: str, temperature: float) -> str:
    return f"{arm}, {draft}, {temperature}"


def _speed(arm: str, draft: str, temperature: float, batch: int) -> float:
    """Returns tokens per second of a fresh server's first requests."""
    texts = json.loads(FILE.read_text())
    prompts = [texts[number % len(texts)][:LONGEST] for number in range(REQUESTS)]
    server = fresh_server(draft, speculative_adaptive=arm != "always")
    with server as url, ThreadPoolExecutor(batch) as pool:
        while draft != PLAIN and not is_drafting(url):
            time.sleep(0.05)
        began = time.perf_counter()
        asked = [
            pool.submit(ask, url, prompt, TOKENS, temperature, seed)
            for seed, prompt in enumerate(prompts)
        ]
        tokens = sum(one.result().tokens for one in asked)
        return tokens / (time.perf_counter() - began)


def is_drafting(url: str) -> bool:
    """Returns whether all drafts of a server draft."""
    with urllib.request.urlopen(f"{url}/get_server_info", timeout=60) as answer:
        verifiers = json.load(answer)["verifiers"].values()
    return all(one["drafting_since"] for one in verifiers)


def _table(speeds: Speeds, drafts: list[str], temperatures: list[float]) -> str:
    lines = ["| draft | temperature | never | always | default | of the better | 90 % |"]
    lines.append("| --- " * 7 + "|")
    for draft in drafts:
        for temperature in temperatures:
            never = speeds[_key("never", PLAIN, temperature)]
            always, default = (
                speeds[_key(arm, draft, temperature)] for arm in ("always", "default")
            )
            means = " | ".join(f"{statistics.mean(arm):.1f}" for arm in (never, always, default))
            low, high = _interval(never, always, default)
            ratio = _ratio(never, always, default)
            lines.append(
                f"| {draft} | {temperature:g} | {means} | {ratio:.3f} | {low:.3f} to {high:.3f} |"
            )
    return "\n".join(lines)


def _ratio(never: list[float], always: list[float], default: list[float]) -> float:
    return statistics.mean(default) / max(statistics.mean(never), statistics.mean(always))


def _interval(*arms: list[float]) -> tuple[float, float]:
    """Returns the 5th and the 95th percentile of the ratio over bootstrap draws."""
    rng = random.Random(1)
    ratios = sorted(_ratio(*(rng.choices(arm, k=len(arm)) for arm in arms)) for _ in range(DRAWS))
    return ratios[DRAWS // 20], ratios[-DRAWS // 20]


if __name__ == "__main__":
    sys.exit(main())
