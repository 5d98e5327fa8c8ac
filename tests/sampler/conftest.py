"""One small model and one sampler for all that a single device can show."""

import math

import jax
import pytest

from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.engine import Sampler
from tests.models.small import random_weights
from tests.sampler.conversations import CONFIG, END


@pytest.fixture(scope="session")
def weights():
    return random_weights(CONFIG)


@pytest.fixture(scope="session")
def new_sampler(weights):
    """(mesh sizes, model, weights, changed sampler fields) -> a Sampler with weights installed as version 3."""

    def make(sizes=None, model=CONFIG, weights=weights, **changes):
        sizes = sizes or {}
        mesh = make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
        fields = dict(slots=8, max_model_len=64, decode_steps=4, prefill_shapes=((8, 8),))
        sampler = Sampler(ModelDef(model), mesh, SamplerConfig(**(fields | changes)), end_tokens=(END,))
        sampler.update(*weights, version=3)
        return sampler

    return make


@pytest.fixture(scope="session")
def sampler(new_sampler):
    """Two shapes of everything, all compiled."""
    sampler = new_sampler(prefill_shapes=((8, 4), (2, 8)), decode_rows=(2,), page_size=8)
    sampler.warm_up()
    return sampler
