"""Suites while SFT trains, with a real network, engine and sandboxes: training keeps its bits, no row is lost.

tests/stages/test_killed_runs.py has those of RL, tests/stages/test_two_hosts.py those of several processes,
tests/stages/test_train_rl.py the RL stage with simulated roles, and tests/train/test_loop.py the hook of SFT.
"""

import numpy as np
import pytest

from benchmarks.compare_workdirs import last_step, read_checkpoint
from composer_jax.observe.metrics import read_metrics
from composer_jax.stages.periodic_evaluation import PeriodicEvaluation
from composer_jax.stages.run import Run
from composer_jax.stages.sft import sft
from tests.stages.base_model import write_base
from tests.stages.periodic_config import get_config

pytestmark = pytest.mark.slow


def test_sft_keeps_its_bits_and_goes_on_with_the_suite_that_was_cut_short(tmp_path, monkeypatch):
    config = get_config(str(write_base(tmp_path / "model")))
    config.stages = ("sft",)
    workdirs = {name: tmp_path / name for name in ("without", "with")}
    config.evaluate.during = ()
    with Run(config, workdirs["without"]) as run:
        sft(run)

    async def fail(*_, **__):
        raise RuntimeError("the machine is gone")

    config.evaluate.during = ("sft",)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the machine is gone"):
        patch.setattr(PeriodicEvaluation, "play", fail)
        with Run(config, workdirs["with"]) as run:
            sft(run)
    with Run(config, workdirs["with"]) as run:
        sft(run)
        assert run.services.sampler.version == -1, "the sampler holds no weights between its suites"
    rows = read_metrics(workdirs["with"] / "metrics" / "evaluate_sft.jsonl")
    assert [(row["step"], row["version"]) for row in rows] == [(2, 2), (4, 4)]
    assert all(row["tokens_bugs"] > 0 and row["lost_bugs"] == 0 for row in rows)
    losses = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(folder / "metrics" / "sft.jsonl")]
        for folder in workdirs.values()
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    folders = [folder / "checkpoints" / "sft" for folder in workdirs.values()]
    expected, actual = (read_checkpoint(folder / str(last_step(folder)))["params"] for folder in folders)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
