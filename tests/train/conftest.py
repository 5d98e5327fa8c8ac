"""What the tests of the learner share that takes time to make."""

import dataclasses
import functools
import math

import jax
import pytest

from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss, LanguageLossConfig
from tests.models.small import random_weights
from tests.train.small_step import BIAS_RATE, CONFIG, OPTIMIZER


@pytest.fixture(scope="session")
def weights():
    return random_weights(CONFIG)


@pytest.fixture(scope="session")
def new_learner():
    """(mesh sizes, dispatch=, config=, loss= and those of Learner) -> a Learner on as many devices as the mesh has.

    Equal arguments give the same Learner, and so its compiled programs, while it is one of the last eight.
    """

    @functools.lru_cache(maxsize=8)
    def make(sizes, dispatch, loss, config, **how):
        mesh = make_mesh(jax.devices()[: math.prod(size for _, size in sizes)], **dict(sizes))
        definition = ModelDef(dataclasses.replace(config, dispatch=dispatch))
        return Learner(definition, OPTIMIZER, loss, mesh, router_bias_update_rate=BIAS_RATE, **how)

    default = LanguageLoss(LanguageLossConfig(mtp_weight=0.3, balance_weight=0.1))
    return lambda sizes=None, *, dispatch="dense", loss=default, config=CONFIG, **how: make(
        tuple((sizes or {}).items()), dispatch, loss, config, **how
    )


@pytest.fixture(scope="session")
def learner(new_learner):
    return new_learner()
