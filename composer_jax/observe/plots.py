"""The curves of a run as PNG files: plain rows in, one picture out.

Rows are those of the metric files (see metrics.py); a missing or null value is a gap. Every function writes
its picture atomically and returns the path, or returns None and writes nothing when the rows hold nothing to
draw.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from composer_jax.observe.picture import (
    DARK,
    LIGHT,
    Rows,
    Theme,
    from_zero,
    label,
    new_figure,
    noisy_curve,
    number,
    save,
    series,
    share_axis,
    step_axis,
)

__all__ = [
    "DARK",
    "LIGHT",
    "plot_health",
    "plot_overview",
    "plot_pretraining",
    "plot_reward",
    "plot_sft",
    "plot_summaries",
    "plot_time_split",
]

Pair = tuple[float | None, float | None]
Marks = Mapping[str, Pair]  # family -> held-out pass@1 before and after RL, each 0..1
Scores = Sequence[tuple[str, float | None, float | None]]  # label, before, after; each a share (0..1)

FAMILY_NAMES = {"bugfix": "bug fixing", "recall": "recall"}
HEALTH = (
    ("entropy", "Policy entropy", "nats per token"),
    ("ratio_max", "Largest importance ratio", "ratio to the sampler"),
    ("grad_norm", "Gradient norm", "L2 norm"),
    ("turns", "Episode length", "turns"),
)


def plot_pretraining(rows: Rows, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Training loss (raw and moving mean) and held-out negative log-likelihood against tokens seen."""
    figure, (ax,) = new_figure(theme, 6.4, 3.4)
    return save(figure, path) if _draw_pretraining(ax, rows, theme) else None


def plot_sft(rows: Rows, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Loss on the assistant tokens of the scripted traces against tokens seen."""
    figure, (ax,) = new_figure(theme, 6.4, 3.4)
    scale, unit = _token_scale(rows)
    drawn = noisy_curve(ax, *series(rows, "tokens", "loss", scale), "loss", theme.series[0])
    label(ax, theme, "Supervised fine-tuning: loss on assistant tokens", f"tokens{unit}", "nats per token")
    return save(figure, path) if drawn else None


def plot_reward(rows: Rows, path: Path, marks: Marks, theme: Theme = LIGHT) -> Path | None:
    """Mean reward per RL step, one panel a family; held-out pass@1 before and after RL at the edges."""
    families = _families(rows)
    if not families:
        return None
    figure, axes = new_figure(theme, 6.4, 0.6 + 2.5 * len(families), len(families))
    for index, (ax, family) in enumerate(zip(axes, families, strict=True)):
        color = theme.series[index % len(theme.series)]
        steps, rewards = series(rows, "step", f"reward_{family}")
        noisy_curve(ax, steps, rewards, "training reward", color)
        _draw_marks(ax, steps, marks.get(family, (None, None)), color, theme)
        share_axis(ax)
        step_axis(ax)
        last = index == len(families) - 1
        label(ax, theme, f"RL reward: {_family_name(family)}", "RL step" if last else "", "mean reward")
    return save(figure, path)


def plot_summaries(rows: Rows, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Summary tokens per episode, and how many of the episodes that need a summary pass, against RL step."""
    figure, (length, passing) = new_figure(theme, 6.4, 5.6, 2)
    drawn = noisy_curve(length, *series(rows, "step", "summary_tokens"), "summary tokens", theme.series[1])
    from_zero(length)
    label(length, theme, "Self-summaries: length", "", "tokens per episode")
    passed = series(rows, "step", "pass_recall")
    if not passed[0]:
        passed = series(rows, "step", "reward_recall")
    drawn = noisy_curve(passing, *passed, "pass rate", theme.series[0]) or drawn
    share_axis(passing)
    label(passing, theme, "Self-summaries: tasks passed", "RL step", "pass rate")
    step_axis(length)
    step_axis(passing)
    return save(figure, path) if drawn else None


def plot_time_split(rows: Rows, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Seconds of each RL step, stacked: rollout, sandbox and grading, training, and the rest of `step_s`.

    `rollout_s`, `sandbox_s` and `train_s` are parts that do not overlap; where they do, the rest is zero.
    """
    rows = [row for row in rows if number(row.get("step_s")) is not None]
    if not rows:
        return None
    figure, (ax,) = new_figure(theme, 6.4, 3.4)
    steps = [row["step"] for row in rows]
    middles = [(a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)]
    edges = [steps[0] - 0.5, *middles, steps[-1] + 0.5]
    parts = _time_parts(rows)
    total = sum(map(sum, parts.values())) or 1.0
    floor = [0.0] * len(rows)
    for (name, seconds), color in zip(parts.items(), (*theme.series[:3], theme.quiet), strict=True):
        top = [low + value for low, value in zip(floor, seconds, strict=True)]
        share = f"{name} {sum(seconds) / total:.0%}"
        ax.stairs(top, edges, baseline=floor, fill=True, color=color, alpha=0.85, linewidth=0, label=share)
        floor = top
    median, longest = sorted(floor)[len(floor) // 2], max(floor)
    if longest > 3 * median > 0:
        # One compiling step would press all the others flat; it is named instead of drawn in full.
        ax.set_ylim(0, 2.2 * median)
        place = floor.index(longest)
        left = place < len(floor) / 2
        ax.annotate(
            f"step {steps[place]}: {longest:.0f} s (cut off)",
            (edges[place + left], 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(5 if left else -5, 0),
            textcoords="offset points",
            ha="left" if left else "right",
            va="top",
            fontsize=8.5,
            color=theme.ink,
        )
    ax.set_xlim(edges[0], edges[-1])
    step_axis(ax)
    label(ax, theme, "Where the time of an RL step goes", "RL step", "seconds", legend_columns=4)
    return save(figure, path)


def plot_health(rows: Rows, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Four signs of a healthy RL run: entropy, largest importance ratio, gradient norm, turns per episode."""
    figure, axes = new_figure(theme, 13.2, 2.6, 1, 4)
    drawn = False
    for ax, (key, title, unit) in zip(axes, HEALTH, strict=True):
        drawn = noisy_curve(ax, *series(rows, "step", key), title, theme.series[0]) or drawn
        step_axis(ax)
        label(ax, theme, title, "RL step", unit, legend_columns=0)
        _say_if_empty(ax, theme)
    return save(figure, path) if drawn else None


def plot_overview(
    pretrain: Rows, rl: Rows, marks: Marks, scores: Scores, path: Path, theme: Theme = LIGHT
) -> Path | None:
    """The run in one picture of 1600x1000 pixels: pretraining, RL reward, summary length, before and after.

    A panel without data says so. `scores` are the rows of the last panel, top to bottom.
    """
    figure, (losses, rewards, lengths, held_out) = new_figure(theme, 10.0, 6.25, 2, 2)
    drawn = [_draw_pretraining(losses, pretrain, theme)]
    for index, family in enumerate(_families(rl)):
        color = theme.series[index % len(theme.series)]
        steps, values = series(rl, "step", f"reward_{family}")
        drawn.append(noisy_curve(rewards, steps, values, _family_name(family), color))
    share_axis(rewards)
    label(rewards, theme, "RL: mean reward on training tasks", "RL step", "reward", legend_columns=2)
    drawn.append(noisy_curve(lengths, *series(rl, "step", "summary_tokens"), "summary tokens", theme.series[1]))
    from_zero(lengths)
    label(lengths, theme, "RL: summary tokens per episode", "RL step", "tokens")
    drawn.append(_draw_scores(held_out, scores, theme))
    label(held_out, theme, "Held-out tasks, before and after RL", "", "")
    for ax in (rewards, lengths):
        step_axis(ax)
    for ax in (losses, rewards, lengths, held_out):
        _say_if_empty(ax, theme)
    return save(figure, path) if any(drawn) else None


def _draw_pretraining(ax: Axes, rows: Rows, theme: Theme) -> bool:
    scale, unit = _token_scale(rows)
    drawn = noisy_curve(ax, *series(rows, "tokens", "loss", scale), "training loss", theme.series[0])
    tokens, heldout = series(rows, "tokens", "heldout_nll", scale)
    if tokens:
        color = theme.series[1]
        ax.plot(tokens, heldout, "-D", color=color, markersize=4, linewidth=1.6, label="held-out")
        _write_beside(ax, tokens[-1], heldout[-1], f"{heldout[-1]:.2f}", (0, 9), color, "center")
    label(ax, theme, "Pretraining: negative log-likelihood", f"tokens{unit}", "nats per token")
    return drawn or bool(tokens)


def _draw_marks(ax: Axes, steps: Sequence[float], marks: Pair, color: str, theme: Theme) -> None:
    """Diamonds left and right of the curve: open before RL, full after."""
    if not steps:
        return
    margin = 0.03 * max(steps[-1] - steps[0], 1)
    for x, y, face, name in (
        (steps[0] - margin, marks[0], theme.paper, "before"),
        (steps[-1] + margin, marks[1], color, "after"),
    ):
        if y is None:
            continue
        words = f"held-out pass@1 {name}"
        ax.plot([x], [y], "D", color=color, markerfacecolor=face, markersize=7, label=words, zorder=5)
        below = y > 0.9
        _write_beside(ax, x, y, f"{y:.0%}", (0, -14 if below else 9), theme.ink, "center")


def _draw_scores(ax: Axes, scores: Scores, theme: Theme) -> bool:
    """One line a measure: an open circle before, a full one after, joined."""
    known = [(name, a, b) for name, a, b in scores if a is not None or b is not None]
    if not known:
        return False
    color = theme.series[0]
    for place, (_, before, after) in enumerate(known):
        if before is not None and after is not None:
            ax.plot([before, after], [place, place], color=theme.quiet, linewidth=2, zorder=1)
        # Each number stands on the outer side of its pair, so that close pairs do not overprint.
        swapped = before is not None and after is not None and after < before
        for value, left, face, edge in (
            (before, not swapped, theme.paper, theme.quiet),
            (after, swapped, color, color),
        ):
            if value is not None:
                ax.plot([value], [place], "o", markersize=8, color=edge, markerfacecolor=face, zorder=2)
                side = ("right", (-9, -3.5)) if left else ("left", (9, -3.5))
                _write_beside(ax, value, place, f"{value:.0%}", side[1], theme.ink, side[0])
    for name, face, edge in (("before", theme.paper, theme.quiet), ("after", color, color)):
        ax.plot([], [], "o", markersize=7, color=edge, markerfacecolor=face, label=name)
    values = [value for _, a, b in known for value in (a, b) if value is not None]
    ax.set_xlim(min(0.0, *values) - 0.13, max(1.0, *values) + 0.13)
    ax.set_ylim(len(known) - 0.5, -0.5)
    ax.set_yticks(range(len(known)), [name for name, _, _ in known])
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.grid(False, axis="y")
    return True


def _write_beside(
    ax: Axes, x: float, y: float, words: str, offset: tuple[float, float], color: str, align: str
) -> None:
    ax.annotate(words, (x, y), xytext=offset, textcoords="offset points", ha=align, fontsize=9, color=color, zorder=6)


def _say_if_empty(ax: Axes, theme: Theme) -> None:
    if not ax.has_data():
        ax.text(0.5, 0.5, "not in this run yet", transform=ax.transAxes, ha="center", color=theme.quiet)
        ax.set(xticks=[], yticks=[])


def _time_parts(rows: Rows) -> dict[str, list[float]]:
    def column(key: str) -> list[float]:
        return [number(row.get(key)) or 0.0 for row in rows]

    parts = {
        "rollout": column("rollout_s"),
        "sandbox + grading": column("sandbox_s"),
        "training": column("train_s"),
    }
    known = [sum(seconds) for seconds in zip(*parts.values(), strict=True)]
    parts["other"] = [max(0.0, whole - part) for whole, part in zip(column("step_s"), known, strict=True)]
    return parts


def _families(rows: Rows) -> list[str]:
    columns = dict.fromkeys(key for row in rows for key in row if key.startswith("reward_"))
    return [key.removeprefix("reward_") for key in columns if series(rows, "step", key)[0]]


def _family_name(family: str) -> str:
    return FAMILY_NAMES.get(family, family.replace("_", " "))


def _token_scale(rows: Rows) -> tuple[float, str]:
    most = max((number(row.get("tokens")) or 0.0 for row in rows), default=0.0)
    for scale, word in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if most >= 0.5 * scale:
            return scale, f" ({word})"
    return 1.0, ""
