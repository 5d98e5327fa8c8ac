"""Run: what the stages share."""

import copy
import dataclasses
import json
import shutil
import sys

import jax
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.ops.attention_form import FormChoice
from composer_jax.parallel import processes
from composer_jax.stages import rollout_services
from composer_jax.stages.pipeline import pipeline
from composer_jax.stages.run import Run, form_lines
from composer_jax.tasks.harbor import write_task
from configs.tiny import get_config
from tests.demo.generate import generate


@pytest.fixture
def new_run(tmp_path, monkeypatch):
    """(size, changed groups of fields) -> a Run of configs/tiny.py in a fresh folder."""
    jax.devices()  # all eight of them, before a Run asks for fewer
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    # Otherwise a Run would point JAX at the cache of whoever runs the tests.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
    runs = []

    def make(size="smoke", **groups):
        config = copy.deepcopy(get_config(size).to_dict())
        for name, fields in groups.items():
            config[name] |= fields
        run = Run(config, tmp_path / f"run{len(runs)}")
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.workdir.close()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        ({"replica": -1, "data": 1, "expert": 1}, (8, 1, 1, 1, 1)),
        ({"replica": -1, "data": 2, "expert": 2}, (2, 2, 2, 1, 1)),
        ({"replica": 2, "data": 1, "expert": 1}, (2, 1, 1, 1, 1)),
        ({"replica": 1, "data": 2, "expert": 4}, (1, 2, 4, 1, 1)),
        ({"replica": -1, "context": 4}, (2, 1, 1, 4, 1)),
        ({"replica": -1, "expert": 2, "context": 2, "tensor": 2}, (1, 1, 2, 2, 2)),
    ],
    ids=str,
)
def test_mesh_sizes_of_eight_devices(new_run, mesh, sizes):
    assert tuple(new_run(mesh=mesh, rl={"batches": ((256, 16), (512, 8))}).mesh.shape.values()) == sizes


def test_the_sharded_config_fits_its_own_mesh(new_run):
    assert dict(new_run("sharded").mesh.shape) == {"replica": 1, "data": 1, "expert": 2, "context": 2, "tensor": 2}


def test_devices_that_do_not_divide_are_named(new_run):
    with pytest.raises(UserError, match="8 devices do not divide over data=3, which leaves none for replica=-1"):
        _ = new_run(mesh={"replica": -1, "data": 3, "expert": 1}).mesh
    with pytest.raises(UserError, match="mesh.expert=0 is not a number of devices"):
        _ = new_run(mesh={"replica": -1, "expert": 0}).mesh
    with pytest.raises(UserError, match="16 devices"):
        _ = new_run(mesh={"replica": 4, "data": 2, "expert": 2}).mesh


@pytest.mark.parametrize(
    ("group", "fields", "name"),
    [
        ("pretrain", {"batch_size": 12}, "pretrain.batch_size has 12"),
        ("sft", {"batch_size": 6}, "sft.batch_size has 6"),
        ("sft", {"batch_size": 16, "accumulate": 4}, "sft.batch_size / accumulate=4 has 4"),
        ("sampler", {"slots": 20}, "sampler.slots has 20"),
        ("rl", {"batches": ((256, 16), (512, 2))}, r"rl.batches\[1\] has 2"),
    ],
)
def test_rows_that_do_not_divide_over_the_mesh_are_named_before_the_first_stage(new_run, group, fields, name):
    fits = {"rl": {"batches": ((256, 16), (512, 8))}} | {group: fields}
    with pytest.raises(UserError, match=f"{name} rows for 8 devices; use a multiple of 8"):
        _ = new_run(mesh={"replica": 1, "data": 2, "expert": 4}, **fits).mesh


@pytest.mark.parametrize(
    ("group", "fields"),
    [
        ("pretrain", {"seq_len": 252}),
        ("sft", {"seq_len": 508}),
        ("rl", {"batches": ((256, 16), (1020, 2))}),
    ],
)
def test_rows_that_context_does_not_divide_are_named_before_the_first_stage(new_run, group, fields):
    new = {"rl": {"batches": ((256, 16), (512, 2))}} | {group: fields}
    with pytest.raises(UserError, match=r"Rows of \d+ tokens do not divide .* context=4, .* multiple of 8"):
        _ = new_run(mesh={"replica": 2, "context": 4}, **new).mesh


def test_a_form_of_attention_that_cannot_run_is_refused_before_the_first_stage(new_run):
    run = new_run(model={"attention_form": "cudnn"}, rl={"batches": ((256, 16), (512, 8))})
    with pytest.raises(
        UserError, match="model.attention_form='cudnn' cannot run here, .* platform 'cpu'; use 'auto' or 'plain'"
    ):
        _ = run.mesh


def test_stages_of_one_form_of_attention_share_a_line():
    fused, plain = FormChoice("cudnn", ""), FormChoice("plain", "this process has no NVIDIA GPU")
    assert form_lines([("pretrain", fused), ("sft", fused), ("rl", fused), ("rl", plain)]) == [
        "attention of pretrain, sft, rl: cudnn",
        "attention of rl: plain, because this process has no NVIDIA GPU",
    ]


def test_a_run_goes_on_with_another_profile(new_run, tmp_path):
    run = new_run(profile={"steps": "3:4"})
    assert list(run.trace("sft").steps) == [3, 4]
    assert run.trace("sft").folder == run.path / "profile" / "sft"
    run.workdir.close()
    again = Run(get_config("smoke").to_dict(), run.path)
    again.workdir.close()
    assert not again.trace("sft").steps


def test_a_stage_that_fails_is_not_done_and_its_seconds_are_kept(new_run):
    run = new_run()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), run.stage("sft"):
            raise ZeroDivisionError
        assert not run.workdir.stage_done("sft")
    spent = json.loads((run.path / "stages" / "sft.used").read_text())["seconds"]
    with run.stage("sft") as result:
        result["loss_last"] = 1.0
    assert run.workdir.stage_result("sft")["loss_last"] == 1.0
    assert run.workdir.stage_result("sft")["seconds"] >= spent > 0


def test_a_stage_whose_weights_do_not_exist_is_named(new_run):
    with pytest.raises(UserError, match="'pretrain' is not done.*run it first"):
        new_run().model.weights_of("pretrain")


def test_a_run_goes_on_with_the_tasks_that_it_began_with_only(new_run, tmp_path):
    tasks = [dataclasses.replace(generate("bugfix", "train", 1, i), family="repository") for i in range(3)]
    for task in tasks[:2]:
        write_task(task, tmp_path / "tasks" / task.id)
    run = new_run(tasks={"train": str(tmp_path / "tasks")}, rl={"groups": {"bugfix": 1, "repository": 1}, "steps": 2})
    assert {run.services.tasks.task("repository", index).id for index in range(2)} == {task.id for task in tasks[:2]}
    run.services.check_task_manifest(0)
    del run.services.tasks
    run.services.check_task_manifest(1)
    del run.services.tasks
    write_task(tasks[2], tmp_path / "tasks" / tasks[2].id)
    with pytest.raises(UserError, match="holds other tasks than when RL in .* began"):
        run.services.check_task_manifest(1)
    run.services.check_task_manifest(0)  # nothing was used yet
    run.services.check_task_manifest(1)
    run.workdir.mark_done("rl", {})
    shutil.rmtree(tmp_path / "tasks")
    del run.services.tasks
    assert run.services.tasks.train == {}  # tasks.train is not read once RL is done


def test_devices_of_the_samplers_own_are_refused_in_several_processes(new_run, monkeypatch):
    run = new_run(mesh={"replica": 1, "data": 1}, rl={"rollout_devices": 1})
    monkeypatch.setattr(rollout_services, "process_count", lambda: 2)
    with pytest.raises(UserError, match="rl.rollout_devices=1 needs a single process, and this run has 2; use"):
        _ = run.services.sampler


def test_gradients_that_the_host_adds_are_refused_in_several_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("composer_jax.stages.run.process_count", lambda: 2)
    config = get_config("smoke")
    config.mesh.replica = 2
    with pytest.raises(UserError, match="mesh.reduction=collective"):
        Run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_pipeline_is_refused_in_several_processes(monkeypatch):
    monkeypatch.setattr(processes, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="supports one process only for now, and there are 2"):
        pipeline(run=None)


OWN_DISPATCH = """
from composer_jax.parallel.dispatch import Dispatch
from composer_jax.parallel.dispatch.dense import dense as bare

dropping = Dispatch(bare, may_drop=True)
complete = Dispatch(bare, may_drop=False)
"""


@pytest.fixture
def own_dispatch(tmp_path, monkeypatch):
    """A module outside the package with dispatches of a user's."""
    (tmp_path / "own_dispatch.py").write_text(OWN_DISPATCH)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_dispatch", None)


@pytest.mark.usefixtures("own_dispatch")
@pytest.mark.parametrize("name", ["ragged_all_to_all", "own_dispatch:dropping", "own_dispatch:bare"])
def test_a_dispatch_that_may_drop_tokens_is_refused_where_episodes_are_sampled(new_run, name):
    """One that does not say so, too."""
    with pytest.raises(UserError, match=f"model.dispatch='{name}' may drop tokens .* use model.dispatch=ring"):
        _ = new_run(model={"dispatch": name}).services.sampler


@pytest.mark.usefixtures("own_dispatch")
def test_a_dispatch_that_never_drops_tokens_samples_episodes(new_run):
    one_device = {"replica": 1, "data": 1}
    sampler = new_run(model={"dispatch": "own_dispatch:complete"}, mesh=one_device).services.sampler
    assert sampler.definition.config.dispatch == "own_dispatch:complete"


def test_a_stage_keeps_the_checkpoint_before_the_latest(new_run):
    """A damaged latest checkpoint then costs the steps since the one before it, not the whole stage."""
    with new_run().model.store("pretrain") as store:
        for step in (1, 2, 3):
            store.save(step, arrays={"w": np.zeros(2)})
        assert store.steps() == [2, 3]


def test_a_folder_of_the_older_schema_is_refused_with_the_names_that_changed(tmp_path):
    stored = {
        "config_hash": "0",
        "config": {"seed": 0, "rl": {"curriculum": {"climb_at": 0.8}}, "sampler": {"capacity": 512}},
    }
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="older config schema .*sampler.capacity is now sampler.max_model_len") as error:
        Run(get_config("smoke"), tmp_path)
    assert "rl.curriculum.climb_at is now rl.curriculum.promote_above" in str(error.value)
