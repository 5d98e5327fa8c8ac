"""Phases of continued pretraining in one config: each with its own rows, mesh and rotary frequencies."""

import copy
import dataclasses
import json
import shutil

import chex
import jax
import numpy as np
import pytest

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.errors import UserError
from composer_jax.models.rope import Yarn
from composer_jax.observe.metrics import read_metrics
from composer_jax.schema.config_dict import to_config_dict
from composer_jax.schema.run_config import run_config
from composer_jax.stages.pretrain import pretrain
from composer_jax.stages.report import results
from composer_jax.stages.run import Run
from configs.tiny import get_config

STAGES = ("pretrain", "mtp", "long_context")
CHANGES = {
    "stages": STAGES,
    "phases__long_context__save_every": 2,
    "model__n_layers": 2,  # compiles in half the time
    "model__scan_unroll": 1,
    "data__max_heldout_bytes": 10_000,
    "phases__mtp__steps": 2,
    "phases__mtp__evaluate_every": 2,
    "phases__mtp__save_every": 2,
}


def config_with(**changes):
    """Returns configs/tiny.py:phases with the given paths ("a.b" as a__b) changed."""
    config = copy.deepcopy(get_config("phases").to_dict())
    for path, value in changes.items():
        *sections, name = path.split("__")
        section = config
        for key in sections:
            section = section[key]
        section[name] = value
    return config


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run of all phases."""
    jax.devices()  # all eight of them, before a Run asks for fewer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("xla")))
        with Run(config_with(**CHANGES), tmp_path_factory.mktemp("phases") / "run") as run:
            pretrain(run)
            yield run


def weights(run, stage):
    return jax.device_get(run.model.weights_of(stage))


@pytest.mark.slow
def test_each_phase_has_its_own_rows_and_network(done):
    tokens = {}
    for stage in STAGES:
        rows = [row for row in read_metrics(done.path / "metrics" / f"{stage}.jsonl") if row["step"]]
        section = done.config.training(stage)
        assert rows[-1]["step"] == section.steps
        tokens[stage] = rows[-1]["tokens"]
        room = section.steps * section.batch_size * section.seq_len
        assert 0.8 * room < tokens[stage] <= room  # rows of exercises end in padding
        network = open_checkpoint(str(done.path / "checkpoints" / stage)).config
        assert network.yarn == (Yarn(4.0, 256) if stage == "long_context" else None)
        assert network.max_context == (1024 if stage == "long_context" else 256)
    assert dict(done.stage_mesh("long_context").shape) == dict(done.mesh.shape) | {"replica": 1, "context": 2}
    assert dict(done.stage_mesh("mtp").shape) == dict(done.mesh.shape)
    summary = results(done)
    assert list(summary["phases"]) == ["mtp", "long_context"]
    assert summary["phases"]["long_context"]["tokens"] == tokens["long_context"]


@pytest.mark.slow
def test_a_phase_starts_from_the_weights_before_it(done):
    (trunk, _), (after, _) = weights(done, "pretrain"), weights(done, "mtp")
    changed = {name for name in trunk if not jax.tree.all(jax.tree.map(np.array_equal, trunk[name], after[name]))}
    assert changed == {"mtp"}  # loss.trained="mtp": the trunk of the first phase as it was
    first = read_metrics(done.path / "metrics" / "long_context.jsonl")[0]
    last = read_metrics(done.path / "metrics" / "mtp.jsonl")[-1]
    # The held-out files in rows of 1,024 instead of 192, under YaRN: another loss, far from that of a new network.
    assert abs(first["heldout_nll"] - last["heldout_nll"]) < 0.5 < np.log(1024) - last["heldout_nll"]


@pytest.mark.slow
def test_an_address_of_the_run_means_its_last_phase(done):
    assert open_checkpoint(str(done.path)).address.path.endswith("checkpoints/long_context")


@pytest.mark.slow
def test_a_phase_that_is_interrupted_continues_on_its_own_mesh(done, tmp_path):
    """The third phase stops after two of its four steps and ends with the weights of the uninterrupted run."""
    folder = tmp_path / "run"
    shutil.copytree(done.path, folder, ignore=shutil.ignore_patterns("long_context*", "*lock*"))
    with Run(config_with(**CHANGES), folder) as run:
        with pytest.MonkeyPatch.context() as patch:
            fail_at_step(patch, "long_context", 3)
            with pytest.raises(RuntimeError, match="power failure"):
                pretrain(run)
        assert run.is_done("mtp") and not run.is_done("long_context")
        steps = [row["step"] for row in read_metrics(run.path / "metrics" / "long_context.jsonl")]
        assert max(steps) == 2
        pretrain(run)
        chex.assert_trees_all_equal(weights(run, "long_context"), weights(done, "long_context"))


def fail_at_step(patch, stage, step):
    from composer_jax.train import loop

    train_step = loop._FitRun.train_step

    def failing(self, number, *, first):
        if self.plan.name == stage and number == step:
            raise RuntimeError("power failure")
        train_step(self, number, first=first)

    patch.setattr(loop._FitRun, "train_step", failing)


def test_stages_follow_the_order_of_the_config():
    config = run_config(config_with())
    assert config.pretraining == STAGES
    swapped = run_config(config_with(stages=("pretrain", "long_context", "mtp", "sft")))
    assert swapped.pretraining == ("pretrain", "long_context", "mtp")
    assert run_config(config_with(stages=("sft",))).pretraining == ()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stages": ("mtp", "pretrain")}, "is not a selection of pretrain, long_context, mtp, sft, rl in this order"),
        ({"stages": ("pretrain", "annealing")}, "is not a selection of"),
        (
            {"phases__long_context__seq_len": 2048},
            "phases.long_context.seq_len=2048 is longer than the context of 1024 tokens",
        ),
        ({"pretrain__seq_len": 512}, "pretrain.seq_len=512 is longer than the context of 256 tokens"),
        ({"phases__mtp__model": {"d_model": 64}}, "model.d_model cannot differ from config.model in one stage"),
        ({"phases__mtp__model": {"rope_theta": "much"}}, "model.rope_theta='much' must be of type float"),
        ({"phases__mtp__steps": 0}, "phases.NAME.steps=0; it must be at least 1"),
        ({"phases__long_context__mesh": {"context": 0}}, "mesh.context=0 is not a number of devices"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        run_config(config_with(**changes))


@pytest.mark.parametrize("name", ["sft", "evaluate_more", "Long Context", "../escape"])
def test_names_that_would_mix_with_other_files_are_refused(name):
    phases = get_config("phases").phases.to_dict()
    with pytest.raises(UserError, match="config.phases has the name"):
        run_config(config_with(phases={name: phases["mtp"]}, stages=("pretrain",)))


def test_rows_that_do_not_divide_over_the_mesh_of_their_phase_are_refused(tmp_path):
    config = config_with(phases__long_context__seq_len=1022)
    with Run(config, tmp_path / "run") as run, pytest.raises(UserError, match="1022"):
        _ = run.mesh


def test_a_phase_survives_the_config_file():
    config = run_config(config_with())
    stored = json.loads(json.dumps(to_config_dict(config).to_dict()))
    assert dataclasses.asdict(run_config(stored)) == dataclasses.asdict(config)
