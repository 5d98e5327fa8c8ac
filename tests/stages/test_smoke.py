"""The whole pipeline in its smallest size, as a user runs it: killed twice on the way, and on eight devices."""

import dataclasses
import json

import pytest

from composer_jax.observe.episodes import read_episodes
from composer_jax.observe.metrics import read_metrics
from composer_jax.stages.pipeline import pipeline
from composer_jax.stages.run import Run
from composer_jax.tasks.harbor import write_task
from launch import flags
from tests.demo.generate import generate
from tests.stages.command_line import finish, kill_when, start
from tests.stages.contract import assert_contract

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("xla")


def steps(workdir, stage) -> list[int]:
    return [row["step"] for row in read_metrics(workdir / "metrics" / f"{stage}.jsonl")]


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache):
    """(folder, result of the last process, its arguments) of a run that was killed in SFT and in RL and resumed."""
    workdir = tmp_path_factory.mktemp("runs") / "smoke"
    folder = tmp_path_factory.mktemp("tasks")
    for split, count in (("train", 3), ("heldout", 2)):
        for index in range(count):
            task = dataclasses.replace(generate("bugfix", split, 7, index), family="repository")
            write_task(task, folder / split / task.id)
    arguments = (
        "--config=tests/stages/smoke_config.py:smoke",
        "--config.rl.steps=3",  # the one after the kill compiles, the one after that must not
        "--config.rl.groups.repository=1",
        f"--config.tasks.train={folder / 'train'}",
        f"--config.tasks.heldout={folder / 'heldout'}",
    )
    kill_when(start(workdir, *arguments, cache=cache), lambda: len(steps(workdir, "sft")) > 9)
    assert not (workdir / "stages" / "sft.json").exists()
    pretrained = (workdir / "stages" / "pretrain.json").read_bytes()
    kill_when(start(workdir, *arguments, cache=cache), lambda: len(steps(workdir, "rl")) >= 1)
    assert not (workdir / "stages" / "rl.json").exists()
    result = finish(start(workdir, *arguments, cache=cache))
    assert result.returncode == 0, result.stderr
    assert (workdir / "stages" / "pretrain.json").read_bytes() == pretrained
    return workdir, result, arguments


def test_results_fulfil_the_contract(run):
    workdir = run[0]
    results = json.loads((workdir / "results.json").read_text())
    assert_contract(results, k=2)
    assert results["cpt"]["heldout_nll_last"] < results["cpt"]["heldout_nll_first"]
    assert results["rl"]["steps"] == 3
    assert set(results["phases_s"]) >= {"pretrain", "sft", "evaluate_before", "evaluate_greedy", "rl", "evaluate_after"}
    assert results["suites"]["two_bugs"]["greedy"]["rl_minus"]["tasks"] == 1
    assert (
        results["suites"]["two_bugs"]["greedy"]["attempts"] == 1 < results["suites"]["two_bugs"]["before"]["attempts"]
    )
    assert set(results["heldout"]["repository"]) == {"pass_at_1_before", "pass_at_1_greedy", "pass_at_1_after"}
    assert results["config_hash"] == json.loads((workdir / "config.json").read_text())["config_hash"]


def test_every_step_was_taken_once_in_spite_of_the_kills(run):
    workdir = run[0]
    assert steps(workdir, "pretrain") == list(range(13))
    assert steps(workdir, "sft") == list(range(1, 17))
    assert steps(workdir, "rl") == [1, 2, 3]


def test_tasks_of_a_path_are_trained_on_once(run):
    rows = read_metrics(run[0] / "metrics" / "rl.jsonl")
    assert all(0 <= row["reward_repository"] <= 1 for row in rows)
    recorded = read_episodes(run[0] / "episodes" / "rl.jsonl")
    used = [(record.step, record.task_id) for record in recorded if record.family == "repository"]
    assert len({task for _, task in used}) == len({step for step, _ in used}) == 3


def test_rl_stops_compiling_after_its_first_step(run):
    rows = read_metrics(run[0] / "metrics" / "rl.jsonl")
    assert rows[2]["compilations"] == 0


def test_the_suite_of_the_config_ran_after_its_step(run):
    rows = read_metrics(run[0] / "metrics" / "evaluate_rl.jsonl")
    assert [(row["step"], row["lost_bugfix"]) for row in rows] == [(2, 0)]
    page = (run[0] / "report.html").read_text(encoding="utf-8")
    assert "RL: pass@1 of suites that ran while it trained" in page and (run[0] / "plots" / "suites_rl.png").exists()


def test_the_report_is_one_file_without_a_network(run):
    page = (run[0] / "report.html").read_text(encoding="utf-8")
    assert len(page) > 10_000
    assert 'src="http' not in page and 'href="http' not in page
    assert "pass@1 of chain whole minus pass@1 here" in page, "the page knows the suites of the config"
    assert list(run[0].rglob("*.png"))


def test_episodes_of_every_part_are_recorded(run):
    trained = {"bugfix", "one_bug", "memory_chain", "repository"}  # too few steps to climb to more bugs
    evaluated = {"bugfix", "two_bugs", "memory_chain", "repository"}
    for name, families in (("before", evaluated), ("rl", trained), ("after", evaluated)):
        records = list(read_episodes(run[0] / "episodes" / f"{name}.jsonl"))
        assert {record.family for record in records} == families
        assert any(record.segments for record in records)


def test_the_last_line_says_how_it_went_and_where_to_look(run):
    workdir, result, _ = run
    last = result.stdout.strip().splitlines()[-1]
    assert "pass@1" in last and str(workdir / "report.html") in last


def test_a_finished_run_is_not_repeated(run):
    workdir, _, arguments = run
    before = {path: path.read_bytes() for path in (workdir / "stages").iterdir()}
    config, _ = flags.parse(["launch.pipeline", *arguments, f"--workdir={workdir}"])
    with Run(config, workdir) as again:
        pipeline(again)
    assert {path: path.read_bytes() for path in (workdir / "stages").iterdir()} == before


def test_the_same_pipeline_passes_on_eight_devices(tmp_path, cache):
    """Ring dispatch over two axes, rows and heads cut, collective reduction; tests/launch/test_hosts.py has data=2."""
    workdir = tmp_path / "sharded"
    result = finish(start(workdir, "--config=tests/stages/smoke_config.py:sharded", cache=cache))
    assert result.returncode == 0, result.stderr
    results = json.loads((workdir / "results.json").read_text())
    assert results["cpt"]["heldout_nll_last"] < results["cpt"]["heldout_nll_first"]
    assert results["sft"]["loss_last"] > 0 and results["rl"]["steps"] == 1
    assert results["suites"]["two_bugs"]["after"]["episodes"] == 2
    mesh = json.loads((workdir / "config.json").read_text())["config"]["mesh"]
    assert (mesh["expert"], mesh["context"], mesh["tensor"], mesh["cpu_devices"]) == (2, 2, 2, 8)
