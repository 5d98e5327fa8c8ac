"""The scatter-adds of floats in a training step, whose order is that of atomics on a GPU (docs/design.md: Resuming bit
for bit). A new one makes a test fail: use a form that sums in a fixed order, or name it there and here."""

import dataclasses

import jax
import jax.numpy as jnp

from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss, LanguageLossConfig
from tests.train.small_step import CONFIG, OPTIMIZER, equations, make_batch

ROWS, LENGTH = 16, 16
EMBEDDING = CONFIG.vocab_size, CONFIG.d_model


def scatter_sums(**axes: int) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(shape of the sums, shape of the summands), per device, of all forms for all platforms that the step may take."""
    config = dataclasses.replace(CONFIG, dispatch="ring", n_mtp_modules=0)
    mesh = make_mesh(jax.devices()[: 8 if axes else 1], **axes)
    learner = Learner(ModelDef(config), OPTIMIZER, LanguageLoss(LanguageLossConfig(balance_weight=0.1)), mesh)
    batch = make_batch(0, ROWS, LENGTH)
    programs = learner.programs({name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in batch.items()})
    sums = set()
    for program, arguments, options in (programs["gradient"], programs["update"]):
        for equation in equations(program.trace(*arguments, **options).jaxpr.jaxpr):
            if equation.primitive.name == "scatter-add" and not equation.params["unique_indices"]:
                total, _, summands = (variable.aval for variable in equation.invars)
                if jnp.issubdtype(total.dtype, jnp.floating):  # sums of integers do not depend on the order
                    sums.add((total.shape, summands.shape))
    return sums


def test_on_one_device_only_the_embedding_sums_in_any_order():
    tokens = ROWS * LENGTH
    gates = (tokens, CONFIG.n_experts), (tokens, CONFIG.experts_per_token)
    # The experts of a token differ, so the gradient of a gate has one summand per sum.
    assert scatter_sums() == {(EMBEDDING, (ROWS, LENGTH, CONFIG.d_model)), gates}


def test_over_several_expert_devices_the_rows_of_a_token_do_too():
    tokens, k = ROWS * LENGTH // 8, CONFIG.experts_per_token  # of a device
    group = 4 * tokens  # whose rows are computed in rounds of twice a device's share
    rows = 2 * group * k // 4
    assert scatter_sums(data=2, expert=4) == {
        (EMBEDDING, (ROWS // 8, LENGTH, CONFIG.d_model)),
        ((tokens, CONFIG.n_experts), (tokens, k)),  # one summand each
        ((group, CONFIG.d_model), (rows, CONFIG.d_model)),
        ((group * k,), (rows,)),  # one summand each, and zeros
    }
