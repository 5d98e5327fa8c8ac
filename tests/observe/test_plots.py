import struct

import matplotlib
import pytest

from composer_jax.observe import findings, picture, plots
from composer_jax.observe.metrics import read_metrics
from tests.observe.example_run import CONFIG, RESULTS

NAN = float("nan")


def size_of_png(path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def test_the_overview_is_one_readable_picture(finished_run, tmp_path):
    names = ("pretrain", "sft", "rl")
    metrics = {name: read_metrics(finished_run / "metrics" / f"{name}.jsonl") for name in names}
    suites = findings.read_suites(RESULTS, CONFIG)
    path = plots.plot_overview(metrics, findings.overview_scores(suites), tmp_path / "overview.png")
    assert size_of_png(path) == (1600, 1000)
    assert 50_000 < path.stat().st_size < 500_000


DRAWN = {
    "pass_at_1": lambda rows, path: plots.plot_pass_at_1(
        [findings.Score("bugs", 0.1, 0.2, 0.5, 0.3, 0.7)] if rows == [ROW] else [],
        {"base": "Base", "before": "Before RL", "after": "After RL"},
        path,
    ),
    "pretraining": lambda rows, path: plots.plot_pretraining(rows, path),
    "sft": lambda rows, path: plots.plot_sft(rows, path),
    "reward": lambda rows, path: plots.plot_reward(rows, {"bugfix": (0.2, 0.8), "memory_chain": (None, 0.5)}, path),
    "summaries": lambda rows, path: plots.plot_summaries(rows, path),
    "time_split": lambda rows, path: plots.plot_time_split(rows, path, picture.DARK),
    "health": lambda rows, path: plots.plot_health(rows, path),
    "nll_by_context": lambda rows, path: plots.plot_nll_by_context(rows, path),
    "staleness": lambda rows, path: plots.plot_staleness(rows, path),
    "suites": lambda rows, path: plots.plot_suites(rows, "RL", path),
    "overview": lambda rows, path: plots.plot_overview({"pretrain": rows, "sft": [], "rl": rows}, [], path),
    "overview_of_a_base": lambda rows, path: plots.plot_overview(
        {"pretrain": [], "sft": rows, "rl": rows},
        [findings.Score("bugs", 0.1, None, 0.5)] if rows == [ROW] else [],
        path,
    ),
}
ROW = {
    **{
        "step": 0,
        "tokens": 3072,
        "loss": 7.0,
        "heldout_nll": 6.9,
        "reward_bugfix": 1.2,
        "reward_memory_chain": -0.1,
    },
    **{
        "summary_tokens": 0,
        "rollout_s": 1.0,
        "sandbox_s": 0.1,
        "train_s": 2.0,
        "step_s": 2.5,
        "first": 4,
        "nll": 3.1,
        "entropy": 0.3,
        "pass_at_1_bugs": 0.5,
        "low_bugs": 0.4,
        "high_bugs": 0.7,
        "staleness_max": 2,
    },
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("rows", [[], [{"step": 1, "loss": None, "step_s": NAN, "reward_bugfix": "?"}]])
def test_nothing_to_draw_writes_nothing(tmp_path, name, rows):
    assert DRAWN[name](rows, tmp_path / "p.png") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", DRAWN)
def test_the_first_row_of_a_run_is_enough(tmp_path, name):
    width, height = size_of_png(DRAWN[name]([ROW], tmp_path / "p.png"))
    assert 700 <= width <= 2200 and 250 <= height <= 1000


def test_drawing_leaves_the_global_state_of_matplotlib_alone(tmp_path):
    before = dict(matplotlib.rcParams)
    plots.plot_sft([ROW], tmp_path / "p.png")
    assert dict(matplotlib.rcParams) == before


def test_the_other_part_is_the_rest_of_a_step_and_never_negative():
    parts = plots.time_parts([{**ROW, "step_s": 4.0}, ROW])
    assert parts["other"] == [pytest.approx(0.9), 0.0]


@pytest.mark.parametrize("families", [1, 2, 3, 5])
def test_a_legend_of_many_rows_does_not_cover_the_title(families):
    figure, (ax,) = picture.new_figure(picture.LIGHT, 5.0, 3.0)
    for family in range(families):
        ax.plot([0, 1], [0, family], label=f"a family with a long name, number {family}")
    picture.label_axes(ax, picture.LIGHT, "Reward", "step", "reward", legend_columns=2)
    figure.canvas.draw()
    title, legend = ax._left_title.get_window_extent(), ax.get_legend().get_window_extent()
    assert title.y0 >= legend.y1 and legend.y0 >= ax.get_window_extent().y1 - 4


def test_the_overview_shows_the_facts_that_summaries_keep(finished_run, tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(plots, "label_axes", lambda ax, theme, title, *more, **options: titles.append(title))
    metrics = {name: read_metrics(finished_run / "metrics" / f"{name}.jsonl") for name in ("pretrain", "sft", "rl")}
    plots.plot_overview(metrics, [], tmp_path / "length.png")
    metrics["rl"] = [{**row, "facts_kept_last": 0.5} for row in metrics["rl"]]
    plots.plot_overview(metrics, [], tmp_path / "facts.png")
    assert [title for title in titles if "summ" in title] == [
        "RL: summary tokens per episode",
        "RL: last summaries that have the facts of the task",
    ]
