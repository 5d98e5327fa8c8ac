"""The common style of all plots: colours, axes, labels, curves. Uses no display and no pyplot state."""

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from composer_jax.atomic_write import write_atomically

Rows = Sequence[Mapping[str, Any]]

DPI = 160
MEAN_WINDOW = 8  # steps; a curve of fewer than two windows has no mean


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of a plot; `palette` is used in order, `muted` is for axes and for values before RL."""

    background: str
    text: str
    muted: str
    grid: str
    palette: tuple[str, ...]


# The Okabe-Ito palette, which colour-blind readers can distinguish, and a lighter one for the dark scheme.
LIGHT = Theme("#ffffff", "#1f2328", "#6e7781", "#e3e6ea", ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#e69f00"))
DARK = Theme("#161b22", "#e6edf3", "#9198a1", "#2d333b", ("#56b4e9", "#ee7733", "#2fbf95", "#cc79a7", "#f0c14b"))


def new_figure(theme: Theme, width: float, height: float, down: int = 1, across: int = 1) -> tuple[Figure, list[Axes]]:
    """Returns a figure of `width` x `height` inches (at DPI pixels) and its axes, row by row."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.05)
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=theme.background, layout=layout)
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(down, across, index + 1) for index in range(down * across)]
    for ax in axes:
        ax.set_facecolor(theme.background)
        ax.set_axisbelow(True)
        ax.grid(True, color=theme.grid, linewidth=0.8)
        ax.ticklabel_format(useOffset=False)
        ax.tick_params(colors=theme.muted, labelsize=8.5, length=0)
        for side in ("top", "right", "left"):
            ax.spines[side].set_visible(False)
        ax.spines["bottom"].set_color(theme.grid)
    return figure, axes


def label_axes(ax: Axes, theme: Theme, title: str, x: str, y: str, legend_columns: int = 3) -> None:
    """Sets title, axis labels and, if `legend_columns`, a legend between title and axes, where it covers no data."""
    labels = len(ax.get_legend_handles_labels()[0]) if legend_columns else 0
    rows = max(1, math.ceil(labels / legend_columns)) if legend_columns else 0
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=theme.text, pad=8 + 14 * rows)
    ax.set_xlabel(x, fontsize=9, color=theme.muted)
    ax.set_ylabel(y, fontsize=9, color=theme.muted)
    if labels:
        ax.legend(
            loc="lower left",
            bbox_to_anchor=(-0.01, 0.99),
            ncols=legend_columns,
            frameon=False,
            fontsize=8.5,
            labelcolor=theme.text,
            borderpad=0.1,
            handlelength=1.4,
            handletextpad=0.5,
            columnspacing=1.4,
        )


def integer_x_axis(ax: Axes) -> None:
    """Puts the ticks of the x axis at whole numbers, because steps are whole."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def start_y_at_zero(ax: Axes) -> None:
    """Sets the y axis from zero to a little above the data."""
    ax.set_ylim(0, 1.08 * ax.dataLim.ymax if ax.has_data() and ax.dataLim.ymax > 0 else 1)


def percent_y_axis(ax: Axes) -> None:
    """Formats the y axis in percent, from 0% to 100% or to the extent of the data."""
    low, high = ax.dataLim.intervaly if ax.has_data() else (0.0, 1.0)
    ax.set_ylim(min(-0.03, low - 0.03), max(1.05, high + 0.05))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def draw_curve(ax: Axes, xs: Sequence[float], ys: Sequence[float], name: str, color: str) -> bool:
    """Draws raw values faintly and their moving mean strongly; returns whether there are any values."""
    if len(xs) < 2 * MEAN_WINDOW:
        if xs:
            ax.plot(xs, ys, "-o", color=color, markersize=3.5, linewidth=1.6, label=name)
        return bool(xs)
    window = min(MEAN_WINDOW * max(1, len(xs) // 200), len(xs) // 4)
    # Centred, because a trailing mean lags behind a steep curve; the window is shorter at both ends.
    near = [ys[max(0, i - window // 2) : i + (window + 1) // 2] for i in range(len(ys))]
    mean = [sum(values) / len(values) for values in near]
    ax.plot(xs, ys, color=color, alpha=0.35, linewidth=0.9)
    ax.plot(xs, mean, color=color, linewidth=2.0, label=f"{name} (mean of {window})")
    return True


def finite_number(value: Any) -> float | None:
    """Returns the value as a finite float, or None for anything else."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def columns(rows: Rows, x: str, y: str, x_scale: float = 1.0) -> tuple[list[float], list[float]]:
    """Returns columns x and y of the rows that have both; x is divided by `x_scale`."""
    pairs = [(finite_number(row.get(x)), finite_number(row.get(y))) for row in rows]
    known = [(a / x_scale, b) for a, b in pairs if a is not None and b is not None]
    return [a for a, _ in known], [b for _, b in known]


def save_figure(figure: Figure, path: Path) -> Path:
    """Writes the figure as a PNG file, atomically; returns the path."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor=figure.get_facecolor())
    return write_atomically(Path(path), buffer.getvalue())
