"""Draws what the dashboards show, from the same queries to a Prometheus: for pages and places
without Grafana.

python -m monitoring.pictures --prometheus http://127.0.0.1:9090 --seconds 600 --output docs/images
"""

import argparse
import io
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

from monitoring.panels import DASHBOARDS, Dashboard, Panel, Query

COLUMNS = 3
_MAX_SERIES = 6


def query_range(
    prometheus: str, promql: str, start: float, end: float, step: float
) -> list[dict[str, Any]]:
    """The series of a query as Prometheus' HTTP API gives them: `metric` and `values` [[time,
    text], ...].
    """
    fields = {"query": promql, "start": start, "end": end, "step": step}
    url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(fields)}"
    with urllib.request.urlopen(url, timeout=30) as response:
        answer = json.load(response)
    series: list[dict[str, Any]] = answer["data"]["result"]
    return series


def draw(
    dashboard: Dashboard, prometheus: str, path: Path, *, seconds: float, interval: str
) -> None:
    """Writes the dashboard's last `seconds` as a PNG; `interval` stands for Grafana's
    $__rate_interval.
    """
    end = time.time()
    span = (end - seconds, end, max(1.0, seconds / 150))
    rows = math.ceil(len(dashboard.panels) / COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(12, 2.5 * rows), squeeze=False)
    for axes, panel in zip(grid.flat, dashboard.panels, strict=False):
        found = [
            (query, query_range(prometheus, query.concrete(interval), *span))
            for query in panel.queries
        ]
        (_draw_heatmap if panel.kind == "heatmap" else _draw_lines)(axes, panel, found, end)
    for axes in grid.flat[len(dashboard.panels) :]:
        axes.remove()
    figure.suptitle(f"{dashboard.title}, over {seconds:.0f} s", fontsize=12)
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=85)
    plt.close(figure)
    # A third of the size, and no difference to the eye.
    Image.open(drawn).convert("RGB").quantize(48).save(path, optimize=True)


def _draw_lines(
    axes: Axes, panel: Panel, found: list[tuple[Query, list[dict[str, Any]]]], end: float
) -> None:
    scale = {"s": 1e3, "bytes": 2**-20, "percentunit": 100.0}.get(panel.unit, 1.0)
    unit = {"s": " [ms]", "bytes": " [MiB]", "percentunit": " [%]", "reqps": " [1/s]"}
    for query, series in found:
        series.sort(key=lambda one: _natural(_legend(query.legend, one["metric"])))
        for one in series[:_MAX_SERIES]:
            times = [float(moment) - end for moment, _ in one["values"]]
            values = [float(text) * scale for _, text in one["values"]]
            axes.plot(times, values, label=_legend(query.legend, one["metric"]), linewidth=1.2)
    axes.set_title(panel.title + unit.get(panel.unit, ""), fontsize=9)
    axes.tick_params(labelsize=7)
    # Room for the legend.
    axes.set_ylim(0, 1.4 * max([axes.dataLim.y1, 1e-3]))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=6, loc="upper left")


def _draw_heatmap(
    axes: Axes, panel: Panel, found: list[tuple[Query, list[dict[str, Any]]]], end: float
) -> None:
    """Mean share of each bucket over the time shown."""
    series = [one for _, part in found for one in part]
    totals = {
        float(one["metric"]["le"]): sum(float(text) for _, text in one["values"]) for one in series
    }
    previous, names, shares = 0.0, [], []
    whole = totals.get(math.inf, 0.0) or 1.0
    for bound in sorted(totals):
        if totals[bound] - previous > 0:
            names.append(f"{bound:g}")
            shares.append(100 * (totals[bound] - previous) / whole)
        previous = totals[bound]
    axes.bar(names, shares)
    axes.set_title(f"{panel.title} [%]", fontsize=9)
    axes.tick_params(labelsize=7)


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part or 0) if part.isdigit() else 0, part) for part in text.split()]


def _legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template).strip()


def main() -> int:
    """Draws both dashboards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--interval", default="40s", help="stands for Grafana's $__rate_interval")
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        path = arguments.output / f"dashboard-{dashboard.name}.png"
        draw(
            dashboard,
            arguments.prometheus,
            path,
            seconds=arguments.seconds,
            interval=arguments.interval,
        )
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
