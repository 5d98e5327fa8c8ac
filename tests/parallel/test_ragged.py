"""The ragged exchange, which no CPU has: its arithmetic on made-up devices, and what the compiler for TPUs says."""

import importlib.util

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


def everybody_exchanges(operands: list[list], parcels: list[Offsets], room: int) -> list[list]:
    """jax.lax.ragged_all_to_all, step by step as its documentation says; 0 where nothing arrives."""
    outputs = [[0] * room for _ in operands]
    for sender, (operand, sent) in enumerate(zip(operands, parcels, strict=True)):
        for receiver, begin in enumerate(sent.input_offsets):
            size, at = sent.send_sizes[receiver], sent.output_offsets[receiver]
            assert size == parcels[receiver].recv_sizes[sender]
            assert begin + size <= len(operand) and at + size <= room
            for i in range(size):
                assert outputs[receiver][at + i] == 0, "written twice"
                outputs[receiver][at + i] = operand[begin + i]
    return outputs


@st.composite
def loads(draw) -> tuple[np.ndarray, int]:
    """Rows of every device for every other, many of them none or a great many, and room for some."""
    n = draw(st.integers(1, 5))
    size = st.one_of(st.just(0), st.integers(0, 4), st.integers(0, 40))
    sizes = np.array(draw(st.lists(size, min_size=n * n, max_size=n * n)), np.int32).reshape(n, n)
    return sizes, draw(st.integers(1, 60))


@hypothesis.given(loads())
def test_rows_arrive_in_the_order_of_senders_and_find_home_again(load):
    sizes, room = load
    n = len(sizes)
    plans = [plan_exchange(sizes, me, room, np) for me in range(n)]
    sent = np.stack([plan.dispatch.send_sizes for plan in plans])

    # As many as there is room for, those of the first senders first.
    assert (sent <= sizes).all()
    np.testing.assert_array_equal(sent.sum(0), np.minimum(sizes.sum(0), room))
    for receiver in range(n):
        short = np.flatnonzero(sent[:, receiver] < sizes[:, receiver])
        assert short.size == 0 or (sent[short[0] + 1 :, receiver] == 0).all()
    assert [plan.dropped for plan in plans] == list((sizes - sent).sum(1))

    homes = [[(s, r, i) for r in range(n) for i in range(sent[s, r])] for s in range(n)]
    arrived = everybody_exchanges(homes, [plan.dispatch for plan in plans], room)
    for receiver in range(n):
        expected = [(s, receiver, i) for s in range(n) for i in range(sent[s, receiver])]
        assert arrived[receiver] == expected + [0] * (room - len(expected))
    rows = int(sizes.sum(1).max())  # every device has a buffer of one length, which its own rows need not fill
    returned = everybody_exchanges(arrived, [plan.combine for plan in plans], rows)
    assert returned == [home + [0] * (rows - len(home)) for home in homes]


@hypothesis.settings(max_examples=20)
@hypothesis.given(loads())
def test_the_plan_is_the_same_in_jax(load):
    sizes, room = load
    me = len(sizes) - 1
    found = plan_exchange(jnp.asarray(sizes), jnp.int32(me), room)
    jax.tree.map(np.testing.assert_array_equal, found, plan_exchange(sizes, me, room, np))


@pytest.fixture(scope="module")
def tpus():
    """Four TPUs that are not there, but compiled for."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu, the compiler for TPUs: pip install libtpu")
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
            found = DISPATCH["ragged_all_to_all"](x, ids, gates, experts)
            return found.y_TD.astype(jnp.float32).sum(), found

        (_, found), gradients = jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True)(x, gates, experts)
        return found.y_TD, found.dropped[None], gradients

    stored = jax.tree.map(lambda _: spread, experts)
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=(rows, rows, stored, rows), out_specs=(rows, rows, (rows, rows, stored))
    )
    arguments = array(rows, (t, d)), array(rows, (t, k)), experts, array(rows, (t, k), jnp.int32)
    compiled = jax.jit(mapped).lower(*arguments).compile().as_text()
    # There and back, and both again for the gradient.
    assert compiled.count(" ragged-all-to-all-start(") == 4
