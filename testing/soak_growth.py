"""Finds growth in a soak's samples, and plots them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Increase over the level after the warm-up that does not count as growth: a share of it, or an
# amount.
TOLERANCES = {
    "rss_mib": (0.03, 6.0),
    "private_mib": (0.03, 6.0),
    "descriptors": (0.0, 4.0),
    "threads": (0.0, 1.0),
    "kv_pages_held": (0.0, 8.0),
    "segments": (0.0, 0.0),
}


@dataclass(frozen=True)
class Series:
    """A quantity over time."""

    what: str
    kind: str  # key of TOLERANCES
    seconds: list[float]
    values: list[float]


def all_series(samples: Sequence[dict[str, Any]]) -> list[Series]:
    """Returns everything that must not grow."""
    found = []
    times = [sample["seconds"] for sample in samples]
    names = sorted({name for sample in samples for name in sample["processes"]})
    for name in names:
        # PSS is not judged: it moves with what else on the machine maps the same libraries.
        for kind in ("rss_mib", "private_mib", "descriptors", "threads"):
            values = [sample["processes"].get(name, {}).get(kind) for sample in samples]
            known = [(t, v) for t, v in zip(times, values, strict=True) if v is not None]
            found.append(
                Series(f"{name} {kind}", kind, [t for t, _ in known], [v for _, v in known])
            )
    held = [sample["engine"]["kv_pages_held"] for sample in samples]
    found.append(Series("KV pages held", "kv_pages_held", times, held))
    count = [float(sample["segments"]) for sample in samples]
    found.append(Series("shared-memory segments", "segments", times, count))
    return found


def growth(samples: Sequence[dict[str, Any]], warm_up: float) -> list[dict[str, Any]]:
    """Compares the medians of the quarters of the time after the warm-up, and returns the
    robust slope.

    What grows without end is higher in the last quarter than in the first, by more than the
    tolerance, and than in the third, by more than a third of it: a steady leak is both or neither.
    What fills and then stays, as an allocator's high-water mark does, is only the first.

    The slope is the median of slopes between all pairs of (at most 200) samples (Theil and Sen),
    which single peaks do not move.
    """
    if len(samples) < 10:
        return []
    begin = warm_up * samples[-1]["seconds"]
    rows = []
    for series in all_series(samples):
        points = [(t, v) for t, v in zip(series.seconds, series.values, strict=True) if t >= begin]
        if len(points) < 8:
            continue
        size = len(points) // 4
        first, _, third, last = (
            statistics.median(v for _, v in points[i * size : (i + 1) * size]) for i in range(4)
        )
        thin = points[:: max(1, len(points) // 200)]
        slopes = [
            (v2 - v1) / (t2 - t1)
            for i, (t1, v1) in enumerate(thin)
            for t2, v2 in thin[i + 1 :]
            if t2 > t1
        ]
        part, absolute = TOLERANCES[series.kind]
        allowed = max(part * first, absolute)
        rows.append(
            {
                "what": series.what,
                "first": first,
                "last": last,
                "highest": max(v for _, v in points),
                "per_hour": 3600 * statistics.median(slopes),
                "grew": last - first > allowed and last - third > allowed / 3,
            }
        )
    return rows


def draw(report: dict[str, Any], path: Path) -> None:
    """Plots every process's memory, descriptors and threads, the KV pages and the requests."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    samples = report["samples"]
    if not samples:
        return
    minutes = [sample["seconds"] / 60 for sample in samples]
    figure, grid = plt.subplots(2, 3, figsize=(12, 5.2))
    names = [
        name for name in ("gateway", "verify", "draft", "client") if name in samples[0]["processes"]
    ]
    kinds: tuple[tuple[str, str], ...] = (
        ("rss_mib", "resident memory [MiB]"),
        ("private_mib", "private memory [MiB]"),
    )
    kinds += (("descriptors", "open descriptors"), ("threads", "threads"))
    for axes, (kind, title) in zip(grid.flat, kinds, strict=False):
        for name in names:
            values = [
                sample["processes"].get(name, {}).get(kind, float("nan")) for sample in samples
            ]
            axes.plot(minutes, values, label=name, linewidth=1.1)
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7, loc="center right")
    pages = grid.flat[4]
    for key, label in (
        ("kv_pages_held", "held or cached"),
        ("kv_pages_used", "held"),
        ("kv_pages", "in the pool"),
    ):
        pages.plot(
            minutes, [sample["engine"][key] for sample in samples], label=label, linewidth=1.1
        )
    pages.plot(
        minutes, [sample["segments"] for sample in samples], label="shared segments", linewidth=1.1
    )
    pages.set_title("KV pages, shared-memory segments", fontsize=9)
    pages.legend(fontsize=7, loc="center right")
    done = grid.flat[5]
    done.plot(minutes, [sample["requests"] for sample in samples], linewidth=1.1)
    done.set_title("requests answered", fontsize=9)
    for axes in grid.flat:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=7)
        axes.set_xlabel("minutes", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)
