"""A picture of the rows of benchmarks.traffic_learning: what users keep of the agent's lines, by cycle and arm."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from benchmarks.seeded_runs import Row
from benchmarks.traffic_learning_rows import CHANGED, CONTROLS, clustered_difference, sums
from composer_jax.observe.picture import LIGHT, integer_x_axis, label_axes, new_figure, save_figure

ARMS = ("loop", *CONTROLS)
POPULATIONS = ("first", "second")


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draws kept lines by cycle, with 95 % intervals over the users of all seeds: a plot for each population.

    Raises ValueError without a row of an arm in ARMS.
    """
    shown = [row for row in rows if row.get("arm") in ARMS and row["population"] in POPULATIONS]
    found = [name for name in POPULATIONS if any(row["population"] == name for row in shown)]
    if not found:
        raise ValueError(f"no row is of the arms {', '.join(ARMS)}; there is nothing to draw.")
    figure, axes = new_figure(LIGHT, 4.2, 3.2, across=len(found))
    for ax, population in zip(axes, found, strict=True):
        _draw_population(ax, [row for row in shown if row["population"] == population])
        label_axes(ax, LIGHT, f"{population.capitalize()} population", "cycle", "share of edited lines kept", 4)
    return save_figure(figure, path)


def _draw_population(ax: Axes, rows: Sequence[Row]) -> None:
    for arm, color in zip(ARMS, LIGHT.palette, strict=False):
        runs = [row for row in rows if row["arm"] == arm]
        cycles = range(1, 1 + min((len(run["cycles"]) for run in runs), default=0))
        means = [clustered_difference(sums(runs, cycle, "kept"), {"zero": (0.0, 1)}) for cycle in cycles]
        points = [(cycle, mean) for cycle, mean in zip(cycles, means, strict=True) if mean is not None]
        if points:
            xs = [cycle for cycle, _ in points]
            ax.fill_between(xs, [m["low"] for _, m in points], [m["high"] for _, m in points], color=color, alpha=0.15)
            ax.plot(xs, [m["difference"] for _, m in points], color=color, marker="o", markersize=3, label=arm)
    ax.axvline(CHANGED - 0.5, color=LIGHT.muted, linewidth=0.8, linestyle=":")
    ax.annotate(
        "tastes change",
        (CHANGED - 0.5, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(-3, 0),
        textcoords="offset points",
        ha="right",
        fontsize=7.5,
        color=LIGHT.muted,
    )
    integer_x_axis(ax)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
