"""Plots of a run as PNG files.

Each function takes rows of the metric files (metrics.py), in which a missing or null value is a gap. It writes its plot
atomically and returns the path, or returns None and writes nothing if the rows have no data for it.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from composer_jax.observe.findings import Pair, Score, readable, suite_names
from composer_jax.observe.picture import (
    LIGHT,
    Rows,
    Theme,
    columns,
    draw_curve,
    finite_number,
    integer_x_axis,
    label_axes,
    new_figure,
    percent_y_axis,
    save_figure,
    start_y_at_zero,
)

_NOT_YET = "not in this run yet"
Marks = Mapping[str, Pair]  # family -> held-out pass@1 before and after RL, each 0..1
Panels = Sequence[tuple[str, str, Mapping[str, str]]]
"""Title, unit, and name -> column of the curves of each panel."""
HEALTH: Panels = (
    ("Policy entropy", "nats per token", {"entropy": "entropy"}),
    ("Largest importance ratio", "ratio to the sampler", {"ratio": "ratio_max"}),
    ("Gradient norm", "L2 norm", {"norm": "grad_norm"}),
    ("Episode length", "turns", {"turns": "turns"}),
)
STALENESS: Panels = (
    (
        "Staleness",
        "weights versions",
        {"oldest token": "staleness_max", "in flight": "staleness_in_flight", "in queue": "staleness_in_queue"},
    ),
    ("KL of sampler and learner", "nats per token", {"k1": "sampler_kl"}),
    ("Out of the trust region", "fraction of tokens", {"out of the region": "out_of_region"}),
    ("Replayed experts", "fraction of choices", {"foreign": "replay_foreign", "filtered": "replay_filtered"}),
    (
        "Groups after the step",
        "groups",
        {"queued": "groups_queued", "playing": "groups_playing", "dropped": "groups_dropped"},
    ),
)
"""What keeps the sampler and the learner apart."""


def plot_pass_at_1(scores: Sequence[Score], titles: Mapping[str, str], path: Path, theme: Theme = LIGHT) -> Path | None:
    """Plots a line per suite, top to bottom: pass@1 of each policy, and the 95 % interval of the change.

    titles: field of a Score -> what the legend calls it.
    """
    figure, (ax,) = new_figure(theme, 4.8, 1.3 + 0.36 * len(scores))
    if not _draw_scores(ax, scores, titles, theme):
        return None
    label_axes(ax, theme, "Pass@1 by suite", "", "", legend_columns=2)
    return save_figure(figure, path)


def plot_pretraining(rows: Rows, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Plots training loss (raw and moving mean) and held-out negative log-likelihood against tokens."""
    figure, (ax,) = new_figure(theme, 6.4, 3.4)
    return save_figure(figure, path) if _draw_pretraining(ax, rows, theme) else None


def plot_sft(rows: Rows, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Plots the loss on assistant tokens against tokens."""
    figure, (ax,) = new_figure(theme, 6.4, 3.4)
    return save_figure(figure, path) if _draw_sft(ax, rows, theme) else None


def plot_reward(rows: Rows, marks: Marks, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Plots mean reward per RL step, a panel per family, with held-out pass@1 before and after RL at the edges."""
    families = _families(rows)
    if not families:
        return None
    figure, axes = new_figure(theme, 6.4, 0.6 + 2.5 * len(families), len(families))
    for index, (ax, family) in enumerate(zip(axes, families, strict=True)):
        color = theme.palette[index % len(theme.palette)]
        steps, rewards = columns(rows, "step", f"reward_{family}")
        draw_curve(ax, steps, rewards, "training reward", color)
        _draw_marks(ax, steps, marks.get(family, (None, None)), color, theme)
        percent_y_axis(ax)
        integer_x_axis(ax)
        last = index == len(families) - 1
        label_axes(ax, theme, f"RL reward: {readable(family)}", "RL step" if last else "", "mean reward")
    return save_figure(figure, path)


def plot_summaries(rows: Rows, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Plots summary tokens per episode and the reward of compacted episodes against RL step."""
    figure, (length, passing) = new_figure(theme, 6.4, 5.6, 2)
    drawn = draw_curve(length, *columns(rows, "step", "summary_tokens"), "summary tokens", theme.palette[1])
    start_y_at_zero(length)
    label_axes(length, theme, "Self-summaries: length", "", "tokens per episode")
    passed = columns(rows, "step", "pass_compacted")
    drawn = draw_curve(passing, *passed, "mean reward", theme.palette[0]) or drawn
    percent_y_axis(passing)
    label_axes(passing, theme, "Self-summaries: reward of episodes with summaries", "RL step", "mean reward")
    integer_x_axis(length)
    integer_x_axis(passing)
    return save_figure(figure, path) if drawn else None


def plot_time_split(rows: Rows, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Plots the seconds of each RL step, stacked: rollout, sandbox and grading, training, and the rest of `step_s`.

    The rest is zero where `rollout_s`, `sandbox_s` and `train_s` overlap and add up to more than `step_s`.
    """
    rows = [row for row in rows if finite_number(row.get("step_s")) is not None]
    if not rows:
        return None
    figure, (ax,) = new_figure(theme, 6.4, 3.4)
    steps = [row["step"] for row in rows]
    middles = [(a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)]
    edges = [steps[0] - 0.5, *middles, steps[-1] + 0.5]
    parts = time_parts(rows)
    total = sum(map(sum, parts.values())) or 1.0
    floor = [0.0] * len(rows)
    for (name, seconds), color in zip(parts.items(), (*theme.palette[:3], theme.muted), strict=True):
        top = [low + value for low, value in zip(floor, seconds, strict=True)]
        part = f"{name} {sum(seconds) / total:.0%}"
        ax.stairs(top, edges, baseline=floor, fill=True, color=color, alpha=0.85, linewidth=0, label=part)
        floor = top
    median, longest = sorted(floor)[len(floor) // 2], max(floor)
    if longest > 3 * median > 0:
        # A step that compiles would flatten all others; it is cut off and annotated.
        ax.set_ylim(0, 2.2 * median)
        index = floor.index(longest)
        left = index < len(floor) / 2
        ax.annotate(
            f"step {steps[index]}: {longest:.0f} s (cut off)",
            (edges[index + left], 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(5 if left else -5, 0),
            textcoords="offset points",
            ha="left" if left else "right",
            va="top",
            fontsize=8.5,
            color=theme.text,
        )
    ax.set_xlim(edges[0], edges[-1])
    integer_x_axis(ax)
    label_axes(ax, theme, "Where the time of an RL step goes", "RL step", "seconds", legend_columns=4)
    return save_figure(figure, path)


def plot_staleness(rows: Rows, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Plots how far sampler and learner are apart at each RL step: staleness, KL, tokens and experts that differ, and
    the groups that wait, play, or were dropped."""
    return _plot_panels(rows, STALENESS, 2.8, "not recorded in this run", path, theme)


def plot_suites(rows: Rows, stage: str, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Plots pass@1 of the suites that ran while a stage trained, against its step, with 95 % intervals as bands.

    Args:
      rows: of metrics/evaluate_STAGE.jsonl.
      stage: its name as the axes show it, such as "RL".
    """
    figure, (ax,) = new_figure(theme, 6.4, 3.4)
    names = suite_names(rows)
    for index, name in enumerate(names):
        color = theme.palette[index % len(theme.palette)]
        of_suite = [row for row in rows if f"pass_at_1_{name}" in row]
        steps, rates = columns(of_suite, "step", f"pass_at_1_{name}")
        low, high = (columns(of_suite, "step", f"{bound}_{name}") for bound in ("low", "high"))
        ax.fill_between(low[0], low[1], high[1], color=color, alpha=0.15, linewidth=0)
        ax.vlines(low[0], low[1], high[1], color=color, alpha=0.4, linewidth=1)  # a single row has no band
        ax.plot(steps, rates, "-o", color=color, markersize=3.5, linewidth=1.6, label=readable(name))
    percent_y_axis(ax)
    integer_x_axis(ax)
    label_axes(ax, theme, f"{stage}: pass@1 while it trains, 95% interval", f"{stage} step", "pass@1")
    return save_figure(figure, path) if names else None


def plot_health(rows: Rows, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Plots four diagnostics of an RL run: entropy, largest importance ratio, gradient norm, turns per episode."""
    return _plot_panels(rows, HEALTH, 2.6, _NOT_YET, path, theme)


def _plot_panels(rows: Rows, panels: Panels, height: float, note: str, path: Path, theme: Theme) -> Path | None:
    figure, axes = new_figure(theme, 13.2, height, 1, len(panels))
    drawn = False
    for ax, (title, unit, curves) in zip(axes, panels, strict=True):
        for (name, key), color in zip(curves.items(), theme.palette, strict=False):
            drawn = draw_curve(ax, *columns(rows, "step", key), name, color) or drawn
        integer_x_axis(ax)
        label_axes(ax, theme, title, "RL step", unit, legend_columns=0)
        if len(curves) > 1 and ax.has_data():
            ax.legend(loc="best", fontsize=8, labelcolor=theme.text, facecolor=theme.background, framealpha=0.7)
        _mark_empty(ax, theme, note)
    return save_figure(figure, path) if drawn else None


def plot_nll_by_context(rows: Rows, path: Path, theme: Theme = LIGHT) -> Path | None:
    """Plots the loss of a text against the tokens of context; the rows are those of evals/score.py."""
    first, nll = columns(rows, "first", "nll")
    if not first:
        return None
    figure, (ax,) = new_figure(theme, 6.4, 3.4)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.plot(first, nll, "-o", color=theme.palette[0], markersize=4, linewidth=1.6)
    _annotate(ax, first[-1], nll[-1], f"{nll[-1]:.2f}", (0, 9), theme.palette[0], "center")
    label_axes(ax, theme, "Loss by context: does more of it help?", "tokens of context, at least", "nats per token")
    return save_figure(figure, path)


def plot_overview(
    metrics: Mapping[str, Rows], scores: Sequence[Score], path: Path, theme: Theme = LIGHT
) -> Path | None:
    """Plots the run in one picture of 1600x1000 pixels: loss, RL reward, summaries, before and after RL.

    The loss is that of pretraining, or of SFT in a run without pretraining. Of summaries it shows how many have the
    facts that their tasks name, or how long they are where none do. A run without summaries has the turns of its
    episodes instead. A panel without data has a note.

    Args:
      metrics: rows of "pretrain", "sft" and "rl".
      scores: the rows of the last panel, top to bottom.
    """
    rl = metrics["rl"]
    figure, (losses, rewards, lengths, held_out) = new_figure(theme, 10.0, 6.25, 2, 2)
    if metrics["sft"] and not metrics["pretrain"]:
        drawn = [_draw_sft(losses, metrics["sft"], theme)]
    else:
        drawn = [_draw_pretraining(losses, metrics["pretrain"], theme)]
    for index, family in enumerate(_families(rl)):
        color = theme.palette[index % len(theme.palette)]
        steps, values = columns(rl, "step", f"reward_{family}")
        drawn.append(draw_curve(rewards, steps, values, readable(family), color))
    percent_y_axis(rewards)
    label_axes(rewards, theme, "RL: mean reward on training tasks", "RL step", "reward", legend_columns=2)
    if columns(rl, "step", "facts_kept_last")[1]:
        key, title, unit = "facts_kept_last", "RL: last summaries that have the facts of the task", "last summaries"
        percent_y_axis(lengths)
    elif not rl or any(columns(rl, "step", "summary_tokens")[1]):
        key, title, unit = "summary_tokens", "RL: summary tokens per episode", "tokens"
    else:
        key, title, unit = "turns", "RL: turns per episode", "turns"
    drawn.append(draw_curve(lengths, *columns(rl, "step", key), unit, theme.palette[1]))
    if key != "facts_kept_last":
        start_y_at_zero(lengths)
    label_axes(lengths, theme, title, "RL step", unit)
    names = {"base": "base", "before": "before", "after": "after"}
    drawn.append(_draw_scores(held_out, scores, names, theme))
    label_axes(held_out, theme, "Held-out tasks, before and after RL", "", "", legend_columns=3)
    for ax in (rewards, lengths):
        integer_x_axis(ax)
    for ax in (losses, rewards, lengths, held_out):
        _mark_empty(ax, theme)
    return save_figure(figure, path) if any(drawn) else None


def _draw_pretraining(ax: Axes, rows: Rows, theme: Theme) -> bool:
    """Draws the training loss phase by phase, because phases may have different losses."""
    scale, unit = _token_scale(rows)
    drawn = False
    for stage, phase in itertools.groupby(rows, lambda row: row.get("stage", "pretrain")):
        of_phase = list(phase)
        name = "training loss" if of_phase[0] is rows[0] else "_"  # matplotlib's legend leaves out names with _
        drawn = draw_curve(ax, *columns(of_phase, "tokens", "loss", scale), name, theme.palette[0]) or drawn
        if of_phase[0] is not rows[0]:
            place = of_phase[0]["tokens"] / scale
            ax.axvline(place, color=theme.muted, linewidth=1, linestyle=":")
            where = ax.get_xaxis_transform()
            ax.text(place, 0.97, f" {readable(stage)}", transform=where, fontsize=8, color=theme.text, va="top")
    tokens, heldout = columns(rows, "tokens", "heldout_nll", scale)
    if tokens:
        color = theme.palette[1]
        ax.plot(tokens, heldout, "-D", color=color, markersize=4, linewidth=1.6, label="held-out")
        _annotate(ax, tokens[-1], heldout[-1], f"{heldout[-1]:.2f}", (0, 9), color, "center")
    label_axes(ax, theme, "Pretraining: negative log-likelihood", f"tokens{unit}", "nats per token")
    return drawn or bool(tokens)


def _draw_sft(ax: Axes, rows: Rows, theme: Theme) -> bool:
    scale, unit = _token_scale(rows)
    drawn = draw_curve(ax, *columns(rows, "tokens", "loss", scale), "loss", theme.palette[0])
    label_axes(ax, theme, "Supervised fine-tuning: loss on assistant tokens", f"tokens{unit}", "nats per token")
    return drawn


def _draw_marks(ax: Axes, steps: Sequence[float], marks: Pair, color: str, theme: Theme) -> None:
    """Draws diamonds beside the curve: an open one on the left for before RL, a full one on the right for after."""
    if not steps:
        return
    margin = 0.03 * max(steps[-1] - steps[0], 1)
    for x, y, face, name in (
        (steps[0] - margin, marks[0], theme.background, "before"),
        (steps[-1] + margin, marks[1], color, "after"),
    ):
        if y is None:
            continue
        text = f"held-out pass@1 {name}"
        ax.plot([x], [y], "D", color=color, markerfacecolor=face, markersize=7, label=text, zorder=5)
        below = y > 0.9
        _annotate(ax, x, y, f"{y:.0%}", (0, -14 if below else 9), theme.text, "center")


def _draw_scores(ax: Axes, scores: Sequence[Score], titles: Mapping[str, str], theme: Theme) -> bool:
    """Draws a line per measure: an open circle before RL joined to a full one after, and a diamond for the base.

    A bar below them is the 95 % interval of the change: it reaches below the number before where no change is shown.
    """
    if not scores:
        return False
    color = theme.palette[0]
    for place, (_, base, before, after, low, high) in enumerate(scores):
        if low is not None and high is not None:
            ax.plot([low, high], [place + 0.27] * 2, color=color, linewidth=2.5, solid_capstyle="butt")
        if base is not None:
            ax.plot([base], [place], "D", markersize=7, color=theme.muted, zorder=2)
            _annotate(ax, base, place, f"{base:.0%}", (0, 9), theme.text, "center")
        if before is not None and after is not None:
            ax.plot([before, after], [place, place], color=theme.muted, linewidth=2, zorder=1)
        # Each number is on the outer side of its pair, so that the numbers of a close pair do not overlap.
        swapped = before is not None and after is not None and after < before
        for value, left, face, edge in (
            (before, not swapped, theme.background, theme.muted),
            (after, swapped, color, color),
        ):
            if value is not None:
                ax.plot([value], [place], "o", markersize=8, color=edge, markerfacecolor=face, zorder=2)
                side = ("right", (-9, -3.5)) if left else ("left", (9, -3.5))
                _annotate(ax, value, place, f"{value:.0%}", side[1], theme.text, side[0])
    for policy, marker, face, edge in (
        ("base", "D", theme.muted, theme.muted),
        ("before", "o", theme.background, theme.muted),
        ("after", "o", color, color),
    ):
        if any(getattr(score, policy) is not None for score in scores):
            style = {"markersize": 7, "linestyle": "", "color": edge, "markerfacecolor": face}
            ax.plot([], [], marker, label=titles[policy], **style)
    if any(score.low is not None for score in scores):
        ax.plot([], [], color=color, linewidth=2.5, label="95% interval of the change")
    values = [value for _, *rates in scores for value in rates if value is not None]
    ax.set_xlim(min(0.0, *values) - 0.13, max(1.0, *values) + 0.13)
    ax.set_ylim(len(scores) - 0.5, -0.5)
    ax.set_yticks(range(len(scores)), [score.label for score in scores])
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.grid(False, axis="y")
    return True


def _annotate(ax: Axes, x: float, y: float, text: str, offset: tuple[float, float], color: str, align: str) -> None:
    ax.annotate(text, (x, y), xytext=offset, textcoords="offset points", ha=align, fontsize=9, color=color, zorder=6)


def _mark_empty(ax: Axes, theme: Theme, note: str = _NOT_YET) -> None:
    if not ax.has_data():
        ax.text(0.5, 0.5, note, transform=ax.transAxes, ha="center", color=theme.muted)
        ax.set(xticks=[], yticks=[])


def time_parts(rows: Rows) -> dict[str, list[float]]:
    """Returns {part of an RL step: its seconds in each row}; "other" is the rest of `step_s`, at least 0."""

    def column(key: str) -> list[float]:
        return [finite_number(row.get(key)) or 0.0 for row in rows]

    parts = {
        "rollout": column("rollout_s"),
        "sandbox + grading": column("sandbox_s"),
        "training": column("train_s"),
    }
    known = [sum(seconds) for seconds in zip(*parts.values(), strict=True)]
    parts["other"] = [max(0.0, whole - part) for whole, part in zip(column("step_s"), known, strict=True)]
    return parts


def _families(rows: Rows) -> list[str]:
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("reward_"))
    return [key.removeprefix("reward_") for key in keys if columns(rows, "step", key)[0]]


def _token_scale(rows: Rows) -> tuple[float, str]:
    most = max((finite_number(row.get("tokens")) or 0.0 for row in rows), default=0.0)
    for scale, name in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if most >= 0.5 * scale:
            return scale, f" ({name})"
    return 1.0, ""
