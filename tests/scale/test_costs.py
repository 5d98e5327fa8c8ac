"""Costs against closed forms, computed by hand from shapes."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from composer_jax.ops.grouped_matmul import grouped_matmul
from composer_jax.ops.kernel_cost import KernelCost, kernel_cost
from composer_jax.parallel.mesh import make_mesh
from composer_jax.scale.costs import SMALL, Collective, CostAssumptions, estimate_cost

ONE = CostAssumptions({})


def cost(function, *shapes, rules=ONE, dtype=jnp.float32):
    arguments = [jax.ShapeDtypeStruct(s, dtype) if isinstance(s, tuple) else s for s in shapes]
    return estimate_cost(jax.make_jaxpr(function)(*arguments), rules)


def operations(region, kind):
    return [part for _, part in region.walk() if getattr(part, "kind", "") == kind]


def test_a_product_counts_its_multiplications_operands_and_result():
    region = cost(lambda x, w: jnp.einsum("bsd,df->bsf", x, w), (2, 3, 8), (8, 5), dtype=jnp.bfloat16)
    (product,) = operations(region, "matmul")
    assert (product.flops, product.hbm_bytes) == (2 * 6 * 8 * 5, 2 * (6 * 8 + 8 * 5 + 6 * 5))


def test_higher_precision_costs_more_passes():
    def product(precision):
        return cost(lambda x, w: jnp.dot(x, w, precision=precision), (4, 4), (4, 4)).flops()

    assert [product(p) / product(None) for p in ("default", "high", "highest")] == [1, 3, 6]


def test_a_loop_costs_its_body_times_its_length():
    def stack(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    region = cost(stack, (4, 8), (7, 8, 8))
    assert region.flops() == 7 * 2 * 4 * 8 * 8
    (loop,) = region.regions
    assert (loop.name, loop.times) == ("scan", 7)
    # A loop of loops.
    nested = cost(lambda x, w: jax.lax.scan(lambda x, w: (stack(x, w), None), x, w)[0], (4, 8), (3, 7, 8, 8))
    assert nested.flops() == 3 * region.flops()


@pytest.mark.parametrize(("remat", "products"), [(False, 2 + 3), (True, 2 + 2 + 3)])
def test_recomputation_of_checkpoint_counts(remat, products):
    """tanh(tanh(x w1) w2): two products forward, and again with remat; backward two for the weights, one through w2."""

    def layer(x, weights):
        return jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])

    layer = jax.checkpoint(layer) if remat else layer

    def gradient(x, weights):
        return jax.value_and_grad(lambda w: layer(x, w).sum())(weights)

    assert cost(gradient, (4, 8), (2, 8, 8)).flops() == products * 2 * 4 * 8 * 8


def test_dead_code_is_not_counted():
    def wasteful(x, w):
        unused = x @ w
        stacked = jax.lax.scan(lambda c, _: (c, c @ w), x, None, length=5)
        return x @ w + 0 * stacked[0], unused.shape[0]

    assert cost(wasteful, (4, 4), (4, 4)).flops() == 2 * 4 * 4 * 4


MESH = {"data": 2, "expert": 4}


def sharded(function, *specs_and_out):
    *in_specs, out_specs = specs_and_out
    mesh = make_mesh(**MESH)
    return jax.shard_map(function, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)


def test_collectives_count_local_shapes_and_axes():
    """64 x 16 floats in all, over data=2 and expert=4: a device sends (n-1)/n of what it gathers or adds up."""

    def program(x):  # [8,16] on every device
        whole = jax.lax.all_gather(x, "data", axis=0, tiled=True)  # [16,16]
        part = jax.lax.psum_scatter(whole * 2, "expert", scatter_dimension=0, tiled=True)  # [4,16]
        turned = jax.lax.all_to_all(part * 3, "expert", split_axis=0, concat_axis=1, tiled=True)
        passed = jax.lax.ppermute(turned * 5, "data", [(0, 1), (1, 0)])
        return jax.lax.psum(passed * 7, ("data", "expert"))

    rules = CostAssumptions({"replica": 1, "context": 1, "tensor": 1} | MESH)
    region = cost(sharded(program, P(("data", "expert")), P()), (64, 16), rules=rules)
    row = 16 * 4
    collectives = {(c.pattern, c.axes): c.bytes for _, c in region.walk() if isinstance(c, Collective)}
    assert collectives == {
        ("all_gather", ("data",)): 16 * row,
        ("reduce_scatter", ("expert",)): 16 * row,
        ("all_to_all", ("expert",)): 4 * row,
        ("permute", ("data",)): 4 * row,
        ("all_reduce", ("data", "expert")): 4 * row,
    }
    assert region.bytes_sent(rules.sizes) == {
        "data": 16 * row / 2 + 4 * row,
        "expert": 16 * row * 3 / 4 + 4 * row * 3 / 4,
        "data+expert": 2 * 4 * row * 7 / 8,
    }


def test_axes_of_one_device_send_nothing():
    mesh = make_mesh(jax.devices()[:1])
    program = jax.shard_map(lambda x: jax.lax.psum(x, ("data", "expert")), mesh=mesh, in_specs=P(), out_specs=P())
    assert cost(program, (8, 8), rules=CostAssumptions(dict(mesh.shape))).bytes_sent(mesh.shape) == {}


def test_gradients_of_gathered_weights_are_scattered():
    def program(w, x):
        loss = lambda w: (x @ jax.lax.all_gather(w, "data", axis=0, tiled=True)).sum()  # noqa: E731
        return jax.grad(loss)(w)

    rules = CostAssumptions({"replica": 1, "context": 1, "tensor": 1} | MESH)
    region = cost(sharded(program, P("data"), P("expert"), P("data")), (16, 8), (4, 16), rules=rules)
    # The gather is dead code, because only the loss uses it and the loss is not returned.
    collectives = [(c.pattern, c.axes, c.bytes) for _, c in region.walk() if isinstance(c, Collective)]
    assert collectives == [("reduce_scatter", ("data",), 16 * 8 * 4)]


def test_grouped_products_count_only_occupied_rows():
    rows, d, f, experts = 24, 4, 6, 3

    def loss(x, w, sizes):
        return (grouped_matmul(x, w, sizes) ** 2).sum()

    arguments = [
        jax.ShapeDtypeStruct((rows, d), jnp.float32),
        jax.ShapeDtypeStruct((experts, d, f), jnp.float32),
        jax.ShapeDtypeStruct((experts,), jnp.int32),
    ]
    for owned in (1.0, 0.25):
        region = cost(jax.grad(loss, argnums=(0, 1)), *arguments, rules=CostAssumptions({}, occupancy=owned))
        products = operations(region, "grouped_matmul")
        assert len(products) == 3  # forward, of the rows, of the matrices: the TPU's branch, not the CPU's
        assert all(p.flops == owned * 2 * rows * d * f for p in products)
        assert {p.hbm_bytes for p in products} == {4 * (owned * rows * (d + f) + experts * d * f)}
        assert region.flops("matmul") == 0


def test_loops_of_unknown_length_need_a_name():
    def until(x, named):
        loop = functools.partial(jax.lax.while_loop, lambda x: x.sum() < 10, lambda x: x @ x)
        with jax.named_scope("search" if named else "other"):
            return loop(x)

    rules = CostAssumptions({}, loop_counts={"search": 3.0})
    assert cost(lambda x: until(x, True), (4, 4), rules=rules).flops() == 3 * 2 * 4**3
    with pytest.raises(NotImplementedError, match="scope 'other' is unknown"):
        cost(lambda x: until(x, False), (4, 4), rules=rules)


def test_the_innermost_scope_says_how_often_a_loop_runs():
    def loops(x):
        def outer(x):
            with jax.named_scope("at_most_7"):
                return jax.lax.fori_loop(0, x.sum().astype(int), lambda _, x: x @ x, x)

        with jax.named_scope("search"):
            return jax.lax.while_loop(lambda x: x.sum() < 10, outer, x)

    rules = CostAssumptions({}, loop_counts={"search": 3.0})
    assert cost(loops, (4, 4), rules=rules).flops("matmul") == 3 * 7 * 2 * 4**3


def test_the_more_expensive_branch_counts():
    def either(flag, x):
        return jax.lax.cond(flag, lambda x: x @ x, lambda x: x @ x @ x, x)

    flag = jax.ShapeDtypeStruct((), bool)
    assert cost(either, flag, (4, 4)).flops() == 2 * 2 * 4**3
    assert cost(lambda flag, x: either(~flag, x), flag, (4, 4)).flops() == 2 * 2 * 4**3


def test_kernels_count_by_their_estimate_or_formula():
    def doubled(x, estimate=None, name="doubling"):
        def kernel(x_ref, out_ref):
            out_ref[...] = 2 * x_ref[...]

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, cost_estimate=estimate, name=name)(x)

    estimate = pl.CostEstimate(flops=100, bytes_accessed=200, transcendentals=0)
    (product,) = operations(cost(lambda x: doubled(x, estimate), (8, 128)), "matmul")
    assert (product.flops, product.hbm_bytes) == (100, 200)
    with pytest.raises(NotImplementedError, match="'doubling' has neither"):
        cost(doubled, (8, 128))

    @kernel_cost("test_doubling*")
    def formula(call):
        return KernelCost("attention", 7.0 * call.inputs[0].size, 3.0)

    region = cost(lambda x: doubled(x, name="test_doubling_of_rows"), (8, 128))
    assert [(o.flops, o.hbm_bytes) for o in operations(region, "attention")] == [(7.0 * 1024, 3.0)]
    with pytest.raises(ValueError, match="has a formula already"):
        kernel_cost("test_doubling*")(formula)


def test_a_jitted_function_can_be_a_kernel():
    @kernel_cost("test_opaque")
    def formula(call):
        return KernelCost("attention", 11.0, 13.0)

    @jax.jit
    def test_opaque(x):
        return x @ x

    region = cost(lambda x: test_opaque(x) @ x, (4, 4))
    assert (region.flops("attention"), region.flops("matmul")) == (11.0, 2 * 4**3)


LARGE = (512, SMALL // 1024)  # 2 * SMALL bytes of float32
BYTES = 2 * SMALL


def hbm(function, *shapes):
    return sum(o.hbm_bytes for o in operations(cost(function, *shapes), "hbm"))


def test_a_chain_of_elementwise_functions_reads_once_and_writes_once():
    assert hbm(lambda x: jnp.tanh(jnp.exp(x) * 2 + 1), LARGE) == 2 * BYTES


def test_small_results_stay_on_the_chip():
    assert hbm(lambda x: jnp.tanh(x), (512, SMALL // 4096)) == 0


def test_values_with_two_readers_are_stored_and_cheap_ones_recomputed():
    w = jax.ShapeDtypeStruct((LARGE[1], 8), jnp.float32)
    # x is read, exp(x) written and read, and written out once more as both results.
    assert hbm(lambda x: (lambda e: (jnp.sin(e), jnp.cos(e)))(jnp.exp(x)), LARGE) == 5 * BYTES
    # A conversion is not a reason to store; the products read their operands themselves.
    converted = hbm(lambda x: (lambda c: (jnp.sin(c), jnp.cos(c)))(x.astype(jnp.float32)), LARGE)
    assert converted == 3 * BYTES
    # A norm before a product: read once, written once for the product.
    assert hbm(lambda x, w: (x / jnp.sqrt((x * x).sum(-1, keepdims=True))) @ w, LARGE, w) == 2 * BYTES


def test_parts_of_arrays_are_read_as_parts():
    def part(x, i):
        return jnp.tanh(jax.lax.dynamic_slice(x, (i, 0), LARGE))

    index = jax.ShapeDtypeStruct((), jnp.int32)
    assert hbm(part, (8 * LARGE[0], LARGE[1]), index) == 2 * BYTES

    def write(x, row):
        return jax.lax.dynamic_update_slice(x, row, (0, 0))

    assert hbm(write, (8 * LARGE[0], LARGE[1]), LARGE) == 2 * BYTES


def test_gathers_move_only_their_rows():
    ids = jax.ShapeDtypeStruct((512,), jnp.int32)
    assert hbm(lambda x, ids: x.at[ids].get(mode="promise_in_bounds"), (4096, LARGE[1]), ids) == 2 * BYTES
    assert hbm(lambda x, ids, u: x.at[ids].add(u, mode="drop"), (4096, LARGE[1]), ids, LARGE) == 3 * BYTES


def test_another_view_of_the_same_bytes_is_not_a_copy_and_keeps_its_shape():
    def reshaped(x, w):
        y = jnp.exp(x)
        return y.reshape(LARGE[0] * 2, -1) @ w, jnp.sin(y)

    w = jax.ShapeDtypeStruct((LARGE[1] // 2, 8), jnp.float32)
    region = cost(reshaped, LARGE, w)
    assert region.flops() == 2 * LARGE[0] * LARGE[1] * 8
    # x read, exp(x) written, read again by the sine (the product reads for itself), the sine written.
    assert sum(o.hbm_bytes for o in operations(region, "hbm")) == 4 * BYTES


def test_a_product_reads_operands_in_the_form_they_have():
    """Conversions and transpositions for a product alone are part of reading; computed operands are stored."""
    w = jax.ShapeDtypeStruct((LARGE[0], 8), jnp.bfloat16)
    assert hbm(lambda x, w: x.astype(jnp.bfloat16).T @ w, LARGE, w) == 0
    assert hbm(lambda x, w: (2 * x).astype(jnp.bfloat16).T @ w, LARGE, w) == 2 * BYTES
    # For another reader it is one more array: x is read for it, and it is written.
    assert hbm(lambda x, w: (x.astype(jnp.bfloat16).T @ w, x.astype(jnp.bfloat16)), LARGE, w) == 1.5 * BYTES


@pytest.mark.parametrize(("dtype", "share"), [(jnp.int8, 1), (jnp.bfloat16, 2)], ids=str)
def test_numbers_of_8_bits_are_widened_while_a_product_reads_them(dtype, share):
    numbers, w = jax.ShapeDtypeStruct(LARGE, dtype), jax.ShapeDtypeStruct((LARGE[1], 8), jnp.bfloat16)
    (product,) = operations(cost(lambda x, w: x.astype(jnp.bfloat16) @ w, numbers, w), "matmul")
    assert product.hbm_bytes == share * math.prod(LARGE) + 2 * 8 * sum(LARGE)


def test_a_dimension_of_one_is_not_a_copy():
    region = cost(lambda x, w: jnp.einsum("bnsd,df->bnsf", x[:, None], w), (4, *LARGE), (LARGE[1], 8))
    assert operations(region, "hbm") == []
