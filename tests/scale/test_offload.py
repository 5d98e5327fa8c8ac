"""optimizer.offload in the compiled program of a TPU: the optimizer's state is not an argument in device memory."""

import jax
import numpy as np
import pytest

from composer_jax.models.model_def import ModelDef
from composer_jax.scale.topology import tpu_slice
from composer_jax.schema.run_config import run_config
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from tests.scale.configuration import small_config

FIELDS = {"tokens": np.int32, "positions": np.int32, "segments": np.int32, "weights": np.float32}


def compiled_update(offload):
    """Returns XLA's memory analysis of the update on four TPU v5e, and the bytes of a device's optimizer state."""
    run = run_config(small_config())
    mesh = tpu_slice("v5e:2x2").mesh(run.mesh.axis_sizes | {"data": 2})
    optimizer = make_optimizer(OptimizerConfig(offload=offload), 10)
    learner = Learner(ModelDef(run.model), optimizer, LanguageLoss(), mesh)
    batch = {name: jax.ShapeDtypeStruct((8, 64), dtype) for name, dtype in FIELDS.items()}
    update, arguments, keywords = learner.programs(batch)["update"]
    leaves = jax.tree.leaves(learner.abstract_state().optimizer)
    size = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)
    return update.lower(*arguments, **keywords).compile().memory_analysis(), size


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_the_state_is_an_argument_in_host_memory():
    (plain, size), (offloaded, _) = compiled_update(False), compiled_update(True)
    print({name: (m.argument_size_in_bytes, m.temp_size_in_bytes) for name, m in [("no", plain), ("yes", offloaded)]})
    assert plain.host_argument_size_in_bytes == 0 and size > 1_000_000
    assert offloaded.host_argument_size_in_bytes == offloaded.host_output_size_in_bytes > size  # tiles are padded
    saved = plain.argument_size_in_bytes - offloaded.argument_size_in_bytes
    assert saved == offloaded.host_argument_size_in_bytes
