"""RL with devices for the sampler alone."""

import json

import jax
import pytest

from composer_jax.errors import UserError
from composer_jax.stages.run import Run
from composer_jax.stages.train_rl import train_rl
from tests.stages.base_model import write_base
from tests.stages.two_hosts_config import ROW, get_config


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "model"
    write_base(folder)
    return folder


def on_four_devices(base, **rl):
    config = get_config(str(base))
    config.mesh.update({"data": 1, "expert": 4})
    config.evaluate.during = ()
    config.rl.update({"steps": 2, "batches": ((ROW, 4),), **rl})
    return config


@pytest.mark.slow
def test_a_split_mesh_trains_what_a_shared_one_does(base, tmp_path):
    """A deterministic run depends neither on who waits for whom nor on where the sampler is."""
    batches, rows = [], []
    for rollout_devices in (0, 4):
        workdir = tmp_path / str(rollout_devices)
        with Run(on_four_devices(base, rollout_devices=rollout_devices), workdir) as run:
            train_rl(run)
            sampler = run.services.sampler
        expected = jax.devices()[-4:] if rollout_devices else jax.devices()[:4]
        assert list(sampler.mesh.devices.flat) == expected
        batches.append((workdir / "batches.jsonl").read_text())
        rows.append([json.loads(line) for line in (workdir / "metrics" / "rl.jsonl").read_text().splitlines()])
    assert batches[0] == batches[1]
    for name in ("trained_tokens", "reward", "staleness_max"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]]


@pytest.mark.parametrize("rollout_devices", [5, 8])
def test_a_split_that_leaves_a_role_without_devices_is_refused(base, tmp_path, rollout_devices):
    with Run(on_four_devices(base, rollout_devices=rollout_devices), tmp_path / "run") as run:
        with pytest.raises(UserError, match=f"rl.rollout_devices={rollout_devices} and a mesh of 4 devices"):
            train_rl(run)


def test_a_negative_number_of_devices_is_refused(base):
    with pytest.raises(UserError, match="rl.rollout_devices=-1 is negative"):
        Run(on_four_devices(base, rollout_devices=-1), "unused")
