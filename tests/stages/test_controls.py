"""Controls of a run: other runs on the same tasks, whose pass@1 its own is compared with task by task."""

import json

import pytest

from composer_jax.errors import UserError
from composer_jax.evals.interval import interval
from composer_jax.observe.findings import control_tables, read_suites
from composer_jax.stages.evaluate import evaluations, suites, temperature
from composer_jax.stages.report import report
from composer_jax.stages.run import Run
from configs import smollm2_135m
from tests.stages.base_model import write_base

OURS = {"a": 1.0, "b": 0.5, "c": 0.5, "d": 0.0}
THEIRS = {"a": 0.5, "b": 0.5, "c": 0.0, "d": 0.0}


def measures(solved):
    rate = sum(solved.values()) / len(solved)
    return {"suites": {"bugs": {"pass_at_1": rate, "attempts": 2, "tokens_per_summary": 0.0, "solved": solved}}}


def evaluated(folder, which, solved):
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"decode_tokens_per_s": 1.0, "sandbox_runs": 0, "sandbox_hits": 0, "seconds": 1.0, "peak_rss_gb": 0.1}
    (folder / f"evaluate_{which}.json").write_text(json.dumps({**measures(solved), **figures}))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def run(base, tmp_path):
    """A run whose final policy was evaluated."""
    config = smollm2_135m.get_config("smoke")
    config.base = f"hf:{base}"
    config.sampler.max_model_len = 512
    with Run(config, tmp_path / "run") as opened:
        evaluated(opened.path / "stages", "before", THEIRS)
        evaluated(opened.path / "stages", "after", OURS)
        yield opened


def test_the_difference_is_paired_by_task(run):
    evaluated(run.path / "controls" / "rft" / "stages", "before", THEIRS)
    report(run)
    results = json.loads((run.path / "results.json").read_text())
    assert results["suites"]["rl"]["pass_at_1"] == 0.5
    assert results["suites"]["rft"]["pass_at_1"] == 0.25 and results["suites"]["rft"]["tasks"] == 4
    low, high = interval([0.5, 0.0, 0.5, 0.0])
    assert results["controls"] == {"rft": {"difference": 0.25, "low": low, "high": high, "tasks": 4}}
    ((row,),) = [table.rows for table in control_tables(results, read_suites(results, {}))]
    assert low == 0 and (row.name, row.verdict) == ("rft", "not shown to differ")
    assert "This run minus it" in (run.path / "report.html").read_text()


ALL, NONE = dict.fromkeys("abcdef", 1.0), dict.fromkeys("abcdef", 0.0)


@pytest.mark.parametrize(
    ("greedy", "ours", "verdict"), [(NONE, ALL, "better"), (ALL, NONE, "worse"), (OURS, OURS, "not shown to differ")]
)
def test_rl_is_compared_with_greedy_sampling_of_the_policy_before_it(run, greedy, ours, verdict):
    evaluated(run.path / "stages", "greedy", greedy)
    evaluated(run.path / "stages", "after", ours)
    report(run)
    results = json.loads((run.path / "results.json").read_text())
    found = results["suites"]["bugs"]["greedy"]
    assert found["pass_at_1"] == sum(greedy.values()) / len(greedy)
    assert found["rl_minus"]["difference"] == sum(ours.values()) / len(ours) - found["pass_at_1"]
    assert found["rl_minus"]["tasks"] == len(ours)
    assert results["suites"]["sft"]["pass_at_1"] == 0.25, "that of sampling"
    ((row,),) = [table.rows for table in control_tables(results, read_suites(results, {}))]
    assert (row.name, row.verdict) == ("greedy sampling before RL: bugs", verdict)


def test_the_last_evaluation_is_compared_with_the_one_before_it(run):
    def change():
        report(run)
        return json.loads((run.path / "results.json").read_text())["suites"]["bugs"].get("change")

    low, high = interval([0.5, 0.0, 0.5, 0.0])
    after = {"from": "before", "to": "after", "difference": 0.25, "low": low, "high": high, "tasks": 4}
    assert change() == after
    evaluated(run.path / "stages", "base", NONE)
    assert change() == after
    (run.path / "stages" / "evaluate_before.json").unlink()
    assert (change()["from"], change()["difference"], change()["tasks"]) == ("base", 0.5, 4)
    (run.path / "stages" / "evaluate_base.json").unlink()
    assert change() is None


def test_a_task_that_an_evaluation_lost_is_not_compared(run):
    """The infrastructure may lose all attempts at a task; the report is made of the others."""
    evaluated(run.path / "stages", "greedy", {"a": 0.0, "c": 0.0, "d": 0.0})
    evaluated(run.path / "stages", "after", {"a": 1.0, "b": 0.5, "d": 0.0})
    report(run)
    suite = json.loads((run.path / "results.json").read_text())["suites"]["bugs"]
    assert (suite["change"]["difference"], suite["change"]["tasks"]) == (pytest.approx(1 / 6), 3)
    assert (suite["greedy"]["rl_minus"]["difference"], suite["greedy"]["rl_minus"]["tasks"]) == (0.5, 2)
    evaluated(run.path / "stages", "after", {"x": 1.0})
    report(run)
    suite = json.loads((run.path / "results.json").read_text())["suites"]["bugs"]
    assert "change" not in suite and "rl_minus" not in suite["greedy"]


def test_greedy_sampling_is_one_attempt_at_temperature_0(run):
    assert [temperature(run, which) for which in ("before", "greedy", "after")] == [1.0, 0.0, 1.0]
    once, sampled = suites(run, "greedy"), suites(run, "before")
    assert {suite.attempts for suite in once.values()} == {1} < {1, *(suite.attempts for suite in sampled.values())}
    assert {name: suite.tasks for name, suite in once.items()} == {name: suite.tasks for name, suite in sampled.items()}


def test_greedy_sampling_needs_no_rl_to_be_reported(run):
    evaluated(run.path / "stages", "greedy", ALL)
    (run.path / "stages" / "evaluate_after.json").unlink()
    report(run)
    results = json.loads((run.path / "results.json").read_text())
    assert "rl_minus" not in results["suites"]["bugs"]["greedy"]


def test_a_control_that_is_not_evaluated_yet_is_left_out(run):
    (run.path / "controls" / "rft").mkdir(parents=True)
    report(run)
    assert "controls" not in json.loads((run.path / "results.json").read_text())


def test_a_control_on_other_tasks_is_refused(run):
    evaluated(run.path / "controls" / "rft" / "stages", "before", {"a": 1.0, "x": 0.0})
    with pytest.raises(UserError, match="'rft' was measured on 2 tasks, of which 1 are among the 4 of this run"):
        report(run)


def test_a_control_does_not_take_the_name_of_a_suite(run):
    evaluated(run.path / "controls" / "bugs" / "stages", "before", OURS)
    with pytest.raises(UserError, match="controls/bugs has the name of a suite"):
        report(run)


@pytest.mark.parametrize("size", ["short", "long"])
def test_rejection_sampling_is_measured_once_on_the_tasks_of_its_run(base, tmp_path, size):
    config, of = smollm2_135m.get_config(f"{size}_rft"), smollm2_135m.get_config(size)
    assert config.evaluate.suites.to_dict() == of.evaluate.suites.to_dict() and config.seed == of.seed
    assert config.evaluate.temperature == of.evaluate.temperature
    config.base = f"hf:{base}"
    with Run(config, tmp_path / size) as run:
        assert run.config.stages == ("sft",) and evaluations(run) == ["before"]


def test_evaluations_that_the_run_does_not_have_are_refused(base, tmp_path):
    config = smollm2_135m.get_config("short_rft")
    config.base, config.evaluate.which = f"hf:{base}", ("after",)
    with (
        Run(config, tmp_path / "run") as run,
        pytest.raises(UserError, match="leaves no evaluation; this run has base, before"),
    ):
        evaluations(run)
    config.evaluate.which = ("later",)
    with pytest.raises(UserError, match="names 'later'; the evaluations are base, before, greedy, after"):
        Run(config, tmp_path / "other")
