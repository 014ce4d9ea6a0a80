"""Judges a long run in one line: growth, leftovers and wrong texts."""

from collections import Counter
from typing import Any

TIE = 1e-4  # difference of logits below which rounding in batches of other sizes may decide
# Memory of a graph; graphs of rare steps are captured when they first come.
GRAPH_BYTES = 1 << 20
# What may not grow from the middle to the end, and by how much it may differ: the driver loads
# kernels when they first run. Of the draft, while it is the same process.
VERIFIER = {
    "allocated": 1 << 20,
    "blocks": 0,
    "pages_lost": 0,
    "segments": 0,
    "threads": 0,
    "descriptors": 4,
    "driver": 32 << 20,
}
DRAFT = {
    "allocated": 1 << 20,
    "mappings": 0,
    "threads": 0,
    "descriptors": 4,
    "driver": 32 << 20,
}


def problems_of(report: dict[str, Any]) -> list[str]:
    """Returns the problems of a run; prints the resources of both processes in the middle and
    at the end.
    """
    notes, counts = report["notes"], report["counts"]
    problems = [f"a wrong text: {told}" for told in report["wrong"]]
    problems += [what for what in counts if what.startswith("error")]
    if report["steps"] < report["asked"]:
        problems.append(f"{report['steps']} of {report['asked']} steps in the time that there was")
    middle, last = notes[len(notes) // 2], notes[-1]
    same = [note for note in notes if note["pid"] == last["pid"]]
    # Its first attach compiles and loads kernels.
    first = same[min(1, len(same) - 1)]
    for who, before, allowed in (("verifier", middle, VERIFIER), ("draft", first, DRAFT)):
        for name, tolerance in allowed.items():
            one, other = before[who][name], last[who][name]
            if name == "allocated" and who == "verifier":
                tolerance += GRAPH_BYTES * (last[who]["graphs"] - before[who]["graphs"])
            print(f"{who:8} {name:12} {one!s:>12} {other!s:>12}")
            if one is not None and other is not None and other - one > tolerance:
                problems.append(f"the {who}'s {name}: {one}, then {other}")
    print("graphs of the verifier:", [note["verifier"]["graphs"] for note in notes])
    if last["verifier"]["pages_lost"]:
        problems.append(f"{last['verifier']['pages_lost']} pages are lost")
    return problems


def verdict_of(report: dict[str, Any], problems: list[str]) -> str:
    """Returns the verdict in one line."""
    counts = Counter(report["counts"])
    ended = counts["whole texts"] + counts["beginnings"]
    texts = "all texts are those of plain decoding"
    if report["wrong"] or report["ties"]:
        times = [sum(told["times"] for told in report[name]) for name in ("wrong", "ties")]
        texts = f"{times[0]} texts wrong, {times[1]} part where two tokens are within {TIE}"
    return (
        f"{'FAIL' if problems else 'PASS'}: {report['steps']} steps ({report['overlapped']} ahead)"
        f" in {report['seconds']:.0f} s, {counts['kills']} kills and {counts['stops']} stops of the"
        f" draft, {ended} requests ({counts['beginnings']} cancelled), {counts['preemptions']}"
        f" preemptions, {counts['tokens']} tokens; {texts}; "
        + ("; ".join(problems) or "nothing grew, nothing was left")
    )
