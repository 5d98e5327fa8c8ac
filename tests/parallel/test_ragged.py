"""The ragged exchange, which XLA lacks on CPUs: its plan on simulated devices, and compilation for a TPU."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.parallel.dispatch import DISPATCH, Biases, Experts
from composer_jax.parallel.dispatch.ragged import Offsets, plan_exchange
from composer_jax.parallel.mesh import AXES, BATCH_AXES
from composer_jax.parallel.sharding import EXPERT_AXES


def simulate_exchange(operands: list[list], offsets: list[Offsets], capacity: int) -> list[list]:
    """Computes jax.lax.ragged_all_to_all row by row, as documented; 0 where nothing arrives."""
    outputs = [[0] * capacity for _ in operands]
    for sender, (operand, sent) in enumerate(zip(operands, offsets, strict=True)):
        for receiver, begin in enumerate(sent.input_offsets):
            size, at = sent.send_sizes[receiver], sent.output_offsets[receiver]
            assert size == offsets[receiver].recv_sizes[sender]
            assert begin + size <= len(operand) and at + size <= capacity
            for i in range(size):
                assert outputs[receiver][at + i] == 0, "written twice"
                outputs[receiver][at + i] = operand[begin + i]
    return outputs


@st.composite
def loads(draw) -> tuple[np.ndarray, int]:
    """Row counts from every device to every other, often zero or large, and a capacity."""
    n = draw(st.integers(1, 5))
    size = st.one_of(st.just(0), st.integers(0, 4), st.integers(0, 40))
    sizes = np.array(draw(st.lists(size, min_size=n * n, max_size=n * n)), np.int32).reshape(n, n)
    return sizes, draw(st.integers(1, 60))


@hypothesis.given(loads())
def test_rows_arrive_in_the_order_of_senders_and_return(load):
    sizes, capacity = load
    n = len(sizes)
    plans = [plan_exchange(sizes, me, capacity, np) for me in range(n)]
    sent = np.stack([plan.dispatch.send_sizes for plan in plans])

    # As many as fit, those of the first senders first.
    assert (sent <= sizes).all()
    np.testing.assert_array_equal(sent.sum(0), np.minimum(sizes.sum(0), capacity))
    for receiver in range(n):
        short = np.flatnonzero(sent[:, receiver] < sizes[:, receiver])
        assert short.size == 0 or (sent[short[0] + 1 :, receiver] == 0).all()
    assert [plan.dropped for plan in plans] == list((sizes - sent).sum(1))

    homes = [[(s, r, i) for r in range(n) for i in range(sent[s, r])] for s in range(n)]
    arrived = simulate_exchange(homes, [plan.dispatch for plan in plans], capacity)
    for receiver in range(n):
        expected = [(s, receiver, i) for s in range(n) for i in range(sent[s, receiver])]
        assert arrived[receiver] == expected + [0] * (capacity - len(expected))
    rows = int(sizes.sum(1).max())  # every device has a buffer of one length, which its own rows need not fill
    returned = simulate_exchange(arrived, [plan.combine for plan in plans], rows)
    assert returned == [home + [0] * (rows - len(home)) for home in homes]


@hypothesis.settings(max_examples=20)
@hypothesis.given(loads())
def test_the_plan_is_the_same_in_jax(load):
    sizes, capacity = load
    me = len(sizes) - 1
    actual = plan_exchange(jnp.asarray(sizes), jnp.int32(me), capacity)
    chex.assert_trees_all_equal(actual, plan_exchange(sizes, me, capacity, np))


@pytest.fixture(scope="module")
def tpus(libtpu):
    """Four TPU devices of a compile-only topology."""
    from jax.experimental import topologies

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask about itself,
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nor one to keep for this process alone
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 4, 1, 1), (1, 1, 2, 1, 2)], ids=str)
def test_values_and_gradients_compile_for_a_tpu(tpus, shape):
    mesh = Mesh(np.array(tpus).reshape(shape), AXES)
    t, d, f, e, k = 512, 256, 128, 16, 4
    rows, spread = PartitionSpec(BATCH_AXES), PartitionSpec(EXPERT_AXES)
    array = lambda spec, shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(  # noqa: E731
        shape, dtype, sharding=NamedSharding(mesh, spec)
    )
    biases = Biases(*(array(spread, (e, width)) for width in (f, f, d)))
    experts = Experts(*(array(spread, (e, *sizes)) for sizes in ((d, f), (d, f), (f, d))), biases)

    def program(x, gates, experts, ids):
        def objective(x, gates, experts):
            actual = DISPATCH["ragged_all_to_all"](x, ids, gates, experts)
            return actual.y_TD.astype(jnp.float32).sum(), actual

        (_, actual), gradients = jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True)(x, gates, experts)
        return actual.y_TD, actual.dropped[None], gradients

    stored = jax.tree.map(lambda _: spread, experts)
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=(rows, rows, stored, rows), out_specs=(rows, rows, (rows, rows, stored))
    )
    arguments = array(rows, (t, d)), array(rows, (t, k)), experts, array(rows, (t, k), jnp.int32)
    compiled = jax.jit(mapped).lower(*arguments).compile().as_text()
    # There and back, and both again for the gradient.
    assert compiled.count(" ragged-all-to-all-start(") == 4
