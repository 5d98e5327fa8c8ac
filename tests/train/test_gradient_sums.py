"""Gradients are summed in float32: over devices, over chunks of the head and of the experts, rounds and batches."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.reduce_dtype import bytes_sent
from composer_jax.models.decoder import head_logits
from composer_jax.models.predictions import Predictions
from composer_jax.ops.activation import swiglu
from composer_jax.ops.chunks import map_chunks
from composer_jax.parallel.dispatch.contract import Experts
from composer_jax.parallel.dispatch.rounds import compute_in_rounds
from composer_jax.parallel.mesh import BATCH_AXES, make_mesh
from composer_jax.parallel.sharding import all_gather_fsdp, storage_spec
from composer_jax.scale.costs import CostAssumptions, estimate_cost
from composer_jax.train.losses import LanguageLoss
from tests.models.small import LLAMA, random_weights, relative_error, small
from tests.train.small_step import CONFIG, equations, full_gradient, make_batch

BFLOAT16 = dict(compute_dtype="bfloat16", param_dtype="bfloat16", n_mtp_modules=0)
EXPERTS = dataclasses.replace(CONFIG, **BFLOAT16, remat=True, head_chunk=8, expert_chunk=16)
DENSE = small(**LLAMA | BFLOAT16, n_layers=1)
BATCH = make_batch(1)


def gradient_reductions(learner) -> Counter:
    """(primitive, dtype) -> number of the sums of gradients over devices in the step's program.

    A reduce_scatter over `expert` alone belongs to the tokens of the ring, and a psum over axes of size 1 is not a sum.
    """
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in BATCH.items()}
    function, arguments, _ = learner.programs(shapes)["gradient"]
    count = Counter()
    for equation in equations(function.trace(*arguments).jaxpr.jaxpr):
        name, params = equation.primitive.name, equation.params
        is_sum = name.startswith("psum") and any(learner.mesh.shape[axis] > 1 for axis in params["axes"])
        if is_sum or (name == "reduce_scatter" and params["axis_name"] != ("expert",)):
            count[name, equation.invars[0].aval.dtype.name] += 1
    return count


def test_devices_sum_gradients_in_float32_by_default_and_in_bfloat16_on_request(new_learner):
    how = dict(sizes={"data": 4, "expert": 2}, dispatch="ring", config=EXPERTS, loss=LanguageLoss())
    count = gradient_reductions(new_learner(**how))
    assert count["reduce_scatter", "float32"] >= 20
    assert {dtype for _, dtype in count} == {"float32"}
    count = gradient_reductions(new_learner(**how, reduce_dtype="bfloat16"))
    # The router's weight is among them: the option decides for all weights, whatever dtype they are used in.
    assert count["reduce_scatter", "bfloat16"] >= 20 and not count["reduce_scatter", "float32"]


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_a_gather_sends_the_compute_dtype_and_its_gradient_the_reduce_dtype(reduce_dtype):
    mesh, axes = make_mesh(data=4, expert=2), ("embed", None)

    def program(weight, x):
        def loss(weight):
            whole = all_gather_fsdp(weight, axes, jnp.bfloat16, reduce_dtype)
            return (x @ whole).sum().astype(jnp.float32)

        loss, gradient = jax.value_and_grad(loss)(weight)
        return loss[None], gradient

    rows, stored = PartitionSpec(BATCH_AXES), storage_spec(mesh, axes)
    mapped = jax.shard_map(program, mesh=mesh, in_specs=(stored, rows), out_specs=(rows, stored))
    arguments = jnp.zeros((16, 8)), jnp.zeros((8, 16), jnp.bfloat16)
    sent = estimate_cost(jax.make_jaxpr(mapped)(*arguments), CostAssumptions(mesh.shape)).bytes_sent(mesh.shape)
    gather = 3 / 4 * 16 * 8 * 2
    assert sent["data"] == gather + 16 * 8 * bytes_sent(4, reduce_dtype)


def test_the_gradient_of_eight_devices_is_near_that_of_one(new_learner):
    """Both in bfloat16: what remains is the order of products and, with the option, the rounding of sums."""
    weights = random_weights(DENSE)

    def gradient(sizes, **how):
        learner = new_learner(sizes, config=DENSE, loss=LanguageLoss(), **how)
        return full_gradient(learner, weights, BATCH, float(BATCH["weights"].sum()))["head"]

    one = gradient({})
    for reduce_dtype, limit in (("float32", 1e-2), ("bfloat16", 4e-2)):
        assert relative_error(gradient({"data": 8}, reduce_dtype=reduce_dtype), one) < limit


def test_the_gradient_of_the_head_is_summed_over_chunks_in_float32():
    """A sum of 128 parts in bfloat16 is off by 2 %: a part that is small against the sum rounds to nothing."""
    rng = np.random.default_rng(0)
    states_TD = jnp.asarray(rng.standard_normal((1024, 16)), jnp.bfloat16)
    weight_DW = jnp.asarray(rng.standard_normal((16, 32)) / 4, jnp.bfloat16)
    tokens_T = jnp.asarray(rng.integers(0, 32, 1024))

    def loss(weight_DW, states_TD, chunk):
        def logprob(weight_DW, h_TD, token_T):
            return Predictions(head_logits(h_TD, weight_DW)).logprob(token_T)

        return -map_chunks(logprob, chunk, weight_DW, states_TD, tokens_T).mean()

    gradient = jax.jit(jax.grad(loss), static_argnums=2)
    exact = gradient(weight_DW.astype(jnp.float32), states_TD.astype(jnp.float32), None)
    chunked = gradient(weight_DW, states_TD, 8)
    assert chunked.dtype == jnp.bfloat16
    assert norm_error(chunked, exact) < 4e-3  # the rounding of the result, and of the parts


def test_the_gradient_of_experts_is_summed_over_rounds_in_float32():
    rng = np.random.default_rng(0)
    t, d, f, e = 512, 8, 4, 2

    def draw(*shape):
        return jnp.asarray(1 + rng.standard_normal(shape) / 4, jnp.bfloat16)

    x_TD, gates_Tk = draw(t, d), jnp.ones((t, 1), jnp.bfloat16)
    experts = Experts(draw(e, d, f), draw(e, d, f), draw(e, f, d))
    ids_Tk = jnp.asarray(rng.integers(0, e, (t, 1)), jnp.int32)

    def gradient(rows):
        total = lambda w: compute_in_rounds(x_TD, ids_Tk, gates_Tk, w, swiglu, rows).astype(jnp.float32).sum()  # noqa: E731
        return jax.jit(jax.grad(total))(experts).down_EFD

    one, many = gradient(t), gradient(4)
    assert many.dtype == jnp.bfloat16
    assert norm_error(many, one) < 4e-3


def test_the_gradients_of_batches_are_added_in_float32(new_learner):
    """Of bfloat16 weights, too: a thousandth of the sum would round to nothing."""
    learner = new_learner(config=dataclasses.replace(CONFIG, param_dtype="bfloat16"))
    large, little = jnp.ones(4, jnp.bfloat16), jnp.full(4, 1e-3, jnp.bfloat16)
    parts = [{"gradient": {"w": w}, "sums": {"nll": jnp.float32(1)}, "maxima": {}} for w in (large, *100 * [little])]
    total = parts[0]
    for part in parts[1:]:
        total = learner._add(total, part)
    np.testing.assert_allclose(total["gradient"]["w"], 1 + 100 * float(little[0]), rtol=1e-6)
    assert float(total["sums"]["nll"]) == len(parts)


def norm_error(actual, expected) -> float:
    """Norm of the difference over the norm of what is expected."""
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
