"""The table, the JSON file and the picture of a run."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from testing.chaos.faults import FAULTS

GOAL_SECONDS = 10.0
TITLES = (
    "fault",
    "times",
    "requests",
    "lost",
    "wrong",
    "leaks",
    "recovered p50 / max, s",
    f"in {GOAL_SECONDS:g} s",
)


def table(reports: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table by fault, with a last row for all."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for report in reports:
        groups[report["fault"]].append(report)
    rows = [_row(fault.name, groups[fault.name]) for fault in FAULTS if fault.name in groups]
    rows.append(_row("all", reports))
    lines = [TITLES, ("---", *["---:"] * (len(TITLES) - 1)), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write(path: Path, about: dict[str, Any], reports: Sequence[dict[str, Any]]) -> None:
    """Writes the run as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(report) for report in reports)
    path.write_text(
        f'{{\n"about": {json.dumps(about)},\n"faults": [\n{lines}\n]\n}}\n', encoding="utf-8"
    )


def draw(path: Path, reports: Sequence[dict[str, Any]]) -> None:
    """Draws the recovery time of each kind of fault, and the memory of each process over the
    run.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    done = {report["fault"] for report in reports}
    names = [fault.name for fault in FAULTS if fault.name in done]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 0.25 * len(names) + 2), width_ratios=(3, 2), layout="constrained"
    )
    for height, name in enumerate(reversed(names)):
        seconds = list(_seconds(report for report in reports if report["fault"] == name))
        left.plot(seconds, [height] * len(seconds), "o", alpha=0.4, markersize=4, color="tab:blue")
    left.axvline(GOAL_SECONDS, color="tab:red", linewidth=0.8)
    left.set_yticks(range(len(names)), reversed(names))
    left.set_xlabel("seconds until healthy again (red: the goal)")
    left.set_xlim(left=0)
    for service in ("gateway", "verify", "draft", "serve"):
        points = [(r["number"], r["memory"][service]) for r in reports if service in r["memory"]]
        right.plot(*zip(*points, strict=True), ".", markersize=3, label=service)
    right.set_xlabel("fault")
    right.set_ylabel("memory, MiB")
    right.set_ylim(bottom=0)
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _row(name: str, reports: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    seconds = list(_seconds(reports))
    recovered = f"{statistics.median(seconds):.1f} / {max(seconds):.1f}" if seconds else "never"
    never = len(reports) - len(seconds)
    return (
        name,
        len(reports),
        sum(sum(report["outcomes"].values()) for report in reports),
        sum(report["lost"] for report in reports),
        sum(len(report["wrong"]) + bool(report["complaint"]) for report in reports),
        sum(bool(report["leaks"]) for report in reports),
        recovered + (f", {never} never" if never and seconds else ""),
        sum(one <= GOAL_SECONDS for one in seconds),
    )


def _seconds(reports: Iterable[dict[str, Any]]) -> Iterable[float]:
    return (report["recovered"] for report in reports if report["recovered"] is not None)
