"""Two processes of four devices compute what one process of eight computes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel import processes
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.processes import join_processes
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss, LanguageLossConfig
from tests.models.small import random_weights, relative_error
from tests.train.small_step import BIAS_RATE, CONFIG, OPTIMIZER, make_batch

ROOT = Path(__file__).parents[2]


def step():
    """(loss and metrics, gradient, weights after the step) on data=2 x expert=4 over all devices of all processes."""
    mesh = make_mesh(data=2, expert=4)
    learner = Learner(
        ModelDef(CONFIG),
        OPTIMIZER,
        LanguageLoss(LanguageLossConfig(mtp_weight=0.3)),
        mesh,
        router_bias_update_rate=BIAS_RATE,
    )
    batch = make_batch(1)
    normaliser = float(batch["weights"].sum())
    state = learner.init_state(*random_weights(CONFIG))
    gradient = learner.gradient(state.params, state.router_bias, batch, normaliser)["gradient"]
    state, metrics = learner.step(state, [batch], normaliser)
    return metrics, gradient, state.params, state.router_bias


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def run_together(module: str, *arguments: str, count: int = 2) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of `python -m module ADDRESS PROCESS arguments` as processes 0, 1 and so on."""
    address = f"127.0.0.1:{free_port()}"
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, address, str(i), *arguments],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in started]
    return [process.returncode for process in started], outputs


@pytest.mark.slow
def test_two_processes_take_the_same_step_as_one(tmp_path):
    out = tmp_path / "found.npz"
    codes, outputs = run_together("tests.parallel.training_process", str(out))
    assert codes == [0, 0], "\n".join(outputs)[-4000:]
    with np.load(out) as file:
        actual = [file[name] for name in file.files]
    expected = jax.tree.leaves(step())
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("failing", ["nobody", pytest.param("0", marks=pytest.mark.slow), "1"])
def test_processes_join_communicate_and_end_together(failing):
    """If one fails, the other is waiting in a collective."""
    codes, outputs = run_together("tests.parallel.failing_process", failing)
    for i in range(2):
        actual = json.loads(next(line for line in outputs[i].splitlines() if line.startswith("{")))
        assert actual == {
            "who": [i, 2, i == 0],
            "broadcast": [{"by": 0}, [1]],
            "any": [False, True],
            "min": 2.5,
            "here": [[[3 * i, 3 * i + 1, 3 * i + 2]]],
            "gathered": [[0, 1, 2], [3, 4, 5]],
        }
    if failing == "nobody":
        assert codes == [0, 0], outputs
        return
    assert codes == [7, 7], outputs
    assert "mine" in outputs[int(failing)] and f"prog: process {failing} ended: no more" in outputs[1 - int(failing)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host:1", 2, 2), "process=2 is not one of 0 .. 1"),
        (("host:1", 0, 0), "processes=0"),
        (("host", 2, 0), "coordinator='host' is not HOST:PORT"),
        ((None, 2, 5), "processes=2 and process=5 need a coordinator"),
    ],
)
def test_invalid_arguments_are_one_sentence(arguments, message):
    with pytest.raises(UserError, match=message):
        join_processes(*arguments)


def test_a_single_process_needs_no_coordinator():
    assert (
        processes.broadcast_from_process0(lambda: {1, 2}) == {1, 2}
        and processes.any_process(True)
        and not processes.any_process(False)
    )
