"""Runs `foredraft serve` under load, injects seeded faults, and checks every answer.

python -m benchmarks.chaos --faults 500 --seed 1
python -m benchmarks.chaos --list
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from foredraft.errors import ForedraftError
from testing.chaos import leaks, report, room
from testing.chaos.cases import Asker, make_cases
from testing.chaos.faults import FAULTS, Fault, plan
from testing.chaos.load import Load
from testing.chaos.rig import START_SECONDS, Rig
from testing.chaos.room import Room
from testing.chaos.trial import GRACE_SECONDS, Trial

ALGORITHMS = ("NGRAM", "EAGLE3", "STANDALONE")
WARM_SECONDS = 2.0
MIN_MARGIN_SECONDS = 1.0
Block = tuple[str, list[tuple[int, Fault]]]  # an algorithm, and numbered faults


def main() -> int:
    """Returns 0 when nothing was wrong, nothing leaked and the stack always came back."""
    arguments = _parser().parse_args()
    if arguments.list:
        print("\n".join(f"{fault.weight:3} {fault.name}" for fault in FAULTS))
        return 0
    reason = room.enter(["-m", "benchmarks.chaos", *sys.argv[1:]])
    if reason:
        print(f"left out, what fills file systems: {reason}", file=sys.stderr)
    faults = plan(arguments.only, arguments.faults, arguments.seed)
    first, last = arguments.between or (0, len(faults))
    blocks: list[Block] = [(name, []) for name in arguments.algorithms]
    for number, fault in enumerate(faults):
        if first <= number < last and not (reason and fault.needs_room):
            blocks[number * len(blocks) // len(faults)][1].append((number, fault))
    own_room = Room()
    reports = [one for part in arguments.resume or () for one in part]
    try:
        asyncio.run(_run(arguments, blocks, own_room, reports))
    finally:
        own_room.close()
    reports.sort(key=lambda one: one["number"])
    if arguments.output:
        report.write(arguments.output, _about(arguments), reports)
    print(report.table(reports) if reports else "no faults")
    if arguments.plot and reports:
        report.draw(arguments.plot, reports)
    bad = [one for one in reports if one["wrong"] or one["leaks"] or one["complaint"]]
    for one in bad:
        print(f"\n{one['number']} {one['algorithm']} {one['fault']}:")
        print("\n".join(f"  {line}" for line in (*one["wrong"], *one["leaks"], one["complaint"])))
    return 1 if bad or any(one["recovered"] is None for one in reports) else 0


async def _run(
    arguments: argparse.Namespace,
    blocks: list[Block],
    own_room: Room,
    reports: list[dict[str, Any]],
) -> None:
    """Runs the faults of each algorithm on a stack of its own; `reports` grows."""
    known = {one["number"] for one in reports}
    total = len(known | {number for _, block in blocks for number, _ in block})
    bar = tqdm(total=total, initial=len(known), unit="fault", disable=arguments.quiet)
    with bar:
        for algorithm, block in blocks:
            todo = [(number, fault) for number, fault in block if number not in known]
            if not todo:
                continue
            rng = random.Random(f"rig {arguments.seed} {algorithm}")
            rig = Rig(
                algorithm,
                own_room,
                arguments.log,
                arguments.deadline,
                arguments.threads,
                rng,
            )
            try:
                bar.set_description(f"{algorithm}: starting")
                trial = await _prepare(rig, arguments)
                for number, fault in todo:
                    bar.set_description(f"{algorithm}: {fault.name}")
                    found = await trial.run(
                        number, fault, random.Random(f"{arguments.seed} {number}")
                    )
                    reports.append(found.as_dict())
                    if arguments.output:
                        report.write(arguments.output, _about(arguments), reports)
                    bar.update()
                    if not found.is_good:
                        bar.write(f"{number} {fault.name}: {json.dumps(found.as_dict())}")
                    if found.recovered is None:
                        bar.write("the stack did not come back: starting another")
                        await rig.close()
                        trial = await _prepare(rig, arguments)
            finally:
                await rig.close()


async def _prepare(rig: Rig, arguments: argparse.Namespace) -> Trial:
    """Starts the stack, learns the right answers, and sees that load without faults gives them."""
    await rig.start()
    await rig.wait_healthy(START_SECONDS)
    asker = Asker(rig.http, rig.grpc, arguments.deadline, GRACE_SECONDS)
    cases = [await asker.answered(case) for case in make_cases(random.Random(arguments.seed))]
    load = Load(asker, cases, random.Random(arguments.seed), arguments.clients)
    load.start()
    started = time.monotonic()
    while time.monotonic() - started < WARM_SECONDS or len(load.results) < 2 * arguments.clients:
        await asyncio.sleep(0.1)
    results = await load.stop()
    for result in results:
        if result.outcome != "right":
            raise ForedraftError(f"without any fault: {result.outcome} {result.detail}")
    # Idle connections may close a moment later; the check allows for new ones.
    await asyncio.sleep(0.5)
    # How long a whole request takes here is longer than any takes to arrive.
    margin = max(MIN_MARGIN_SECONDS, *(result.ended - result.started for result in results))
    return Trial(rig, asker, cases, await leaks.measure(rig), arguments.clients, margin)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=[f.name for f in FAULTS], metavar="FAULT")
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--clients", type=int, default=4, help="requests at a time")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each model")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds of each request")
    parser.add_argument("--output", type=Path, help="JSON file, written after every fault")
    parser.add_argument(
        "--resume", nargs="+", type=_read, metavar="FILE", help="leave out what these files have"
    )
    parser.add_argument(
        "--between", nargs=2, type=int, metavar=("FIRST", "LAST"), help="only a part of the faults"
    )
    parser.add_argument("--plot", type=Path, help="PNG file")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="the services' lines")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--list", action="store_true", help="print the faults and their weights")
    return parser


def _about(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("seed", "faults", "clients", "threads", "deadline")
    return {name: getattr(arguments, name) for name in names} | {"cpus": os.cpu_count()}


def _read(path: str) -> list[dict[str, Any]]:
    """Returns the reports of an earlier run; for `type` of argparse."""
    try:
        return list(json.loads(Path(path).read_text(encoding="utf-8"))["faults"])
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise argparse.ArgumentTypeError(f"{path}: no report of benchmarks.chaos") from None


if __name__ == "__main__":
    sys.exit(main())
