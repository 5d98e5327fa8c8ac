"""What the tests of the learner share that takes time to make."""

import dataclasses
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
    """(mesh sizes, dispatch=, config=, loss= and those of Learner) -> a Learner on as many devices as the mesh has."""

    def make(sizes=None, *, reduction="collective", dispatch="dense", loss=None, config=CONFIG, reduce_dtype="float32"):
        sizes = sizes or {}
        mesh = make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
        definition = ModelDef(dataclasses.replace(config, dispatch=dispatch))
        loss = loss or LanguageLoss(LanguageLossConfig(mtp_weight=0.3, balance_weight=0.1))
        how = dict(reduction=reduction, reduce_dtype=reduce_dtype, router_bias_update_rate=BIAS_RATE)
        return Learner(definition, OPTIMIZER, loss, mesh, **how)

    return make


@pytest.fixture(scope="session")
def learner(new_learner):
    return new_learner()
