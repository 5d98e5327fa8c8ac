"""Products of float32 operands state their precision; what that means on a backend is not left to its default."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from composer_jax.models.router import Router
from composer_jax.parallel.mesh import make_mesh
from composer_jax.scale.programs import stage_steps
from composer_jax.schema.run_config import run_config
from tests.models.small import small
from tests.scale.configuration import small_config
from tests.train.small_step import equations

MESH = make_mesh(data=4, expert=2)
CHANGES = {"sft__optimizer__name": "muon", "sft__loss__mtp_weight": 0.3, "model__n_mtp_modules": 1}


@pytest.mark.parametrize(("stage", "changes"), [("sft", CHANGES), ("evaluate", {})], ids=str)
def test_products_of_float32_operands_state_their_precision(stage, changes):
    """In all programs of a bfloat16 network: gradient, update, decoding and prefill."""
    config = run_config(small_config(**changes))
    assert config.model.compute_dtype == "bfloat16"
    found = 0
    for step in stage_steps(config, stage, lambda _: MESH).values():
        for program in step.programs.values():
            for equation in equations(program.function.trace(*program.arguments, **program.keywords).jaxpr.jaxpr):
                if equation.primitive.name != "dot_general":
                    continue
                if any(operand.aval.dtype == jnp.float32 for operand in equation.invars):
                    found += 1
                    assert equation.params["precision"] is not None, equation
    assert found


def test_the_routers_product_is_float32_on_every_backend():
    config = small(compute_dtype="bfloat16")
    router = Router(config, rngs=nnx.Rngs(params=0))
    jaxpr = jax.make_jaxpr(lambda x: router(x).scores_TE)(jnp.zeros((4, config.d_model), jnp.bfloat16))
    (product,) = (e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general")
    assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}
