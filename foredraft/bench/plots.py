"""Plots of loads and sweeps. matplotlib comes with the extra `plots`."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from foredraft.bench.load import StageResult
from foredraft.bench.report import check_folder
from foredraft.bench.statistics import Summary
from foredraft.bench.sweep import Case, Results, Setting
from foredraft.errors import ConfigError


def pyplot() -> ModuleType:
    """Returns matplotlib without a display.

    Raises:
        ConfigError: It is not installed; says how to get it.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "plots need matplotlib: pip install 'foredraft[plots]', or leave --plot away"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def check(path: Path) -> None:
    """Raises ConfigError where a plot cannot be written to a path; see `pyplot`, too."""
    plt = pyplot()
    figure = plt.figure()
    known = figure.canvas.get_supported_filetypes()
    plt.close(figure)
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"--plot: {path} is no picture; take .png, or another suffix of one")
    check_folder("--plot", path)


def draw_load(path: Path, results: Sequence[StageResult], summaries: Sequence[Summary]) -> None:
    """Draws distributions of latencies and the course of each stage.

    With several stages also draws figures over load.

    Raises:
        ConfigError: No matplotlib.
    """
    plt = pyplot()
    several = len(summaries) > 1
    figure, grid = plt.subplots(
        2 if several else 1, 3, figsize=(12, 6 if several else 3.2), squeeze=False
    )
    first, gaps, course = grid[0]
    for result, summary in zip(results, summaries, strict=True):
        ok = [record for record in result.records if record.ok]
        _cumulative(first, [record.ttft for record in ok if record.ttft is not None], summary.name)
        every = [gap for record in ok for gap, count in record.gaps for _ in range(count)]
        _cumulative(gaps, every, summary.name)
        times = np.array([moment for record in ok for moment, _ in record.arrivals])
        counts = np.array([count for record in ok for _, count in record.arrivals])
        if len(times):
            bins = np.linspace(0, max(result.seconds, 1e-3), 41)
            rates, _ = np.histogram(times, bins, weights=counts)
            course.plot(bins[:-1], rates / (bins[1] - bins[0]), label=summary.name, linewidth=1)
    for axes, title in ((first, "time to first token [ms]"), (gaps, "between tokens [ms]")):
        axes.set_xscale("log")
        axes.set_title(f"{title}, part of all", fontsize=9)
    course.set_title("output tokens/s over seconds", fontsize=9)
    if several:
        _over_load(grid[1], summaries)
    for axes in grid.flat:
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=7)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _cumulative(axes: Any, seconds: Sequence[float], label: str) -> None:
    if seconds:
        values = np.sort(np.asarray(seconds)) * 1e3
        part = np.arange(1, len(values) + 1) / len(values)
        axes.plot(values, part, label=label, linewidth=1)


def _over_load(grid: Sequence[Any], summaries: Sequence[Summary]) -> None:
    names = [summary.name for summary in summaries]
    ttft, tpot, rate = grid
    for axes, kind in ((ttft, "ttft"), (tpot, "tpot")):
        for point in (50.0, 90.0, 99.0):
            values = [getattr(summary, kind).percentiles[point] * 1e3 for summary in summaries]
            axes.plot(names, values, marker=".", label=f"p{point:g}")
    ttft.set_title("time to first token [ms] over load", fontsize=9)
    tpot.set_title("time per token [ms] over load", fontsize=9)
    rate.plot(names, [s.output_rate for s in summaries], marker=".", label="output tokens/s")
    if all(summary.goodput is not None for summary in summaries):
        twin = rate.twinx()
        twin.plot(
            names, [s.goodput for s in summaries], marker=".", color="C1", label="goodput [req/s]"
        )
        twin.set_ylim(bottom=0)
        twin.legend(fontsize=6, loc="lower right")
    rate.set_title("throughput over load", fontsize=9)
    for axes in grid:
        axes.tick_params(axis="x", rotation=20)
        axes.set_ylim(bottom=0)


def draw_sweep(
    path: Path, settings: Sequence[Setting], cases: Sequence[Case], results: Results
) -> None:
    """Draws heat maps of a sweep: speed over plain decoding, and accept length.

    Rows are settings, columns are cases.

    Raises:
        ConfigError: No matplotlib.
    """
    plt = pyplot()
    known = [one for one in settings if one.key in results.found]
    speedups = [[results.speedup(one, case) or np.nan for case in cases] for one in known]
    lengths = [
        [found.accept_length if (found := results.get(one, case)) else np.nan for case in cases]
        for one in known
    ]
    width = 3.2 + 1.1 * len(cases)
    figure, pair = plt.subplots(1, 2, figsize=(2 * width, 1.4 + 0.3 * len(known)), squeeze=False)
    # Around 1, so that what slows down and what speeds up differ in colour.
    reach = max(0.2, np.nanmax(np.abs(np.log2(np.array(speedups)))))
    panels = (
        (
            pair[0][0],
            np.log2(np.array(speedups)),
            speedups,
            "times plain decoding",
            "RdYlGn",
            reach,
        ),
        (pair[0][1], np.array(lengths), lengths, "tokens per verification", "viridis", None),
    )
    for axes, colours, values, title, palette, bound in panels:
        limits = {} if bound is None else {"vmin": -bound, "vmax": bound}
        image = axes.imshow(colours, cmap=palette, aspect="auto", **limits)
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                if not np.isnan(value):
                    shade = image.norm(colours[y][x])
                    dark = bound is None and shade < 0.5
                    ink = "white" if dark else "black"
                    axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(len(cases)), [case.name for case in cases], fontsize=7, rotation=20)
        axes.set_yticks(range(len(known)), [one.name for one in known], fontsize=7)
    figure.suptitle(f"{results.conditions['model']}: algorithm steps/topk/draft tokens", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
