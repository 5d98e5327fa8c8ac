"""One small model and one sampler for all that a single device can show."""

import contextlib
import functools
import math

import jax
import pytest

from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler import runner
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sampler import Sampler
from tests.models.small import random_weights
from tests.sampler.conversations import CONFIG, END

PROGRAMS = {
    name: functools.lru_cache(maxsize=16)(getattr(runner, name))
    for name in (f"{kind}_program" for kind in ("cache", "prefill", "score", "decode", "write", "read"))
}


@contextlib.contextmanager
def sharing_programs():
    """Samplers of one network, mesh and settings get the same jitted programs, which compile once for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, program in PROGRAMS.items():
            patch.setattr(runner, name, program)
        yield


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with sharing_programs():
        yield


def _forget_programs():
    for program in PROGRAMS.values():
        program.cache_clear()


@pytest.fixture
def nothing_shared():
    """For a test of what a new sampler compiles, whose programs may be patched ones."""
    _forget_programs()
    yield
    _forget_programs()


@pytest.fixture(scope="session")
def weights():
    return random_weights(CONFIG)


@pytest.fixture(scope="session")
def new_sampler(weights):
    """(mesh sizes, model, weights, changed sampler fields) -> a Sampler with weights installed as version 3."""

    def make(sizes=None, model=CONFIG, weights=weights, only_fitting=False, **changes):
        sizes = sizes or {}
        mesh = make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
        fields = dict(slots=8, max_model_len=64, decode_steps=4, prefill_shapes=((8, 8),), page_size=8)
        with sharing_programs():
            config, options = SamplerConfig(**(fields | changes)), {"only_fitting": only_fitting}
            sampler = Sampler(ModelDef(model), mesh, config, end_tokens=(END,), **options)
        sampler.update(*weights, version=3)
        return sampler

    return make


@pytest.fixture(scope="session")
def sampler(new_sampler):
    """Two shapes of everything, all compiled."""
    sampler = new_sampler(prefill_shapes=((8, 4), (2, 8)), decode_rows=(2,))
    sampler.warm_up()
    return sampler
