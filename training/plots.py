"""Draws the curves of a training run as one small PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_curves(
    path: Path,
    title: str,
    x_label: str,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
) -> None:
    """Draws one panel per entry.

    Args:
        path: Path of the PNG to write.
        title: Title shown above all panels.
        x_label: Label of the common x axis.
        panels: Curves by label of the y axis, then by label of the curve: (x values, y values).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.6), squeeze=False)
    for axis, (y_label, curves) in zip(axes[0], panels.items(), strict=True):
        for label, (xs, ys) in curves.items():
            axis.plot(xs, ys, label=label, linewidth=1.2, marker="." if len(xs) < 30 else None)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.grid(alpha=0.3)
        if len(curves) > 1 or "" not in curves:
            axis.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
