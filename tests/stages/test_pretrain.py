"""What pretraining reports of its held-out files, and which rows it reads."""

import math
import weakref
from unittest.mock import MagicMock

import pytest

from composer_jax.schema.training_config import PretrainConfig
from composer_jax.stages import pretrain as module
from composer_jax.stages.pretrain import bits_per_byte, pretrain


def test_a_uniform_guess_of_bytes_costs_eight_bits():
    result = {"heldout_nll_first": math.log(256), "heldout_nll_last": math.log(2)}
    bits = bits_per_byte(result, tokens=1000, num_bytes=1000)
    assert bits == pytest.approx({"heldout_bits_per_byte_first": 8, "heldout_bits_per_byte_last": 1})


def test_longer_tokens_of_equal_loss_cost_less():
    result = {"heldout_nll_first": 3.0, "heldout_nll_last": 2.0}
    short, long = (bits_per_byte(result, tokens=n, num_bytes=1200) for n in (600, 300))
    assert short["heldout_bits_per_byte_last"] == pytest.approx(2 * long["heldout_bits_per_byte_last"])


@pytest.fixture
def run():
    """A run of one phase, whose parts are mocks."""
    run = MagicMock()
    run.is_done.return_value = run.stage.return_value.__exit__.return_value = False
    run.config.pretraining = ("long_context",)
    run.config.training.return_value = PretrainConfig(seq_len=16, batch_size=8, steps=1)
    run.config.seed = 0
    return run


def test_a_process_reads_the_rows_that_its_devices_hold(run, monkeypatch):
    asked = {}
    monkeypatch.setattr(module, "addressable_rows", lambda mesh, batch_size, accumulate: (mesh, batch_size))

    def batches(sources, **arguments):
        asked.update(arguments)
        raise InterruptedError

    monkeypatch.setattr(module, "pretraining_batches", batches)
    with pytest.raises(InterruptedError):
        pretrain(run)
    run.stage_mesh.assert_called_with("long_context")
    assert asked["read_rows"] == (run.stage_mesh.return_value, 8)


def test_the_weights_before_a_stage_take_no_memory_beside_those_that_are_trained(run, monkeypatch):
    class Weights:
        """Stands for arrays on a device."""

    before: list[weakref.ref] = []

    def weights_before(stage):
        weights = Weights(), Weights()
        before.extend(map(weakref.ref, weights))
        return weights

    run.model.weights_before = weights_before
    run.model.learner.return_value.init_state = lambda *weights: "a copy"

    def fit(learner, state, *_, **__):
        assert state == "a copy" and [reference() for reference in before] == [None, None]
        raise InterruptedError

    monkeypatch.setattr(module, "fit", fit)
    for name in ("pretraining_batches", "addressable_rows"):
        monkeypatch.setattr(module, name, MagicMock())
    with pytest.raises(InterruptedError):
        pretrain(run)
