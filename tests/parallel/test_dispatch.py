"""Expert dispatch: every form on every mesh is the sum over chosen experts, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from composer_jax.parallel.dispatch import DISPATCH, Experts
from composer_jax.parallel.mesh import BATCH_AXES, make_mesh
from composer_jax.parallel.sharding import gather_for_use, storage_spec
from tests.models.small import relative_error

T, D, F, E, K = 32, 8, 3, 8, 3
RNG = np.random.default_rng(0)
X = RNG.standard_normal((T, D)).astype(np.float32)
# Lopsided: most tokens choose the first experts, the last is chosen by nobody.
IDS = np.stack([RNG.choice(E, K, replace=False, p=np.array([6, 5, 4, 3, 2, 1, 1, 0]) / 22) for _ in range(T)])
GATES = RNG.random((T, K)).astype(np.float32)
EXPERTS = Experts(*(RNG.standard_normal(shape).astype(np.float32) for shape in ((E, D, F), (E, D, F), (E, F, D))))
AXES = Experts(("experts", "embed", "ff"), ("experts", "embed", "ff"), ("experts", "ff", "embed"))
TARGET = RNG.standard_normal((T, D)).astype(np.float32)
MESHES = {"8x1": (8, 1), "1x8": (1, 8), "2x4": (2, 4), "4x2": (4, 2), "1x1": (1, 1)}


def loop(x, gates, experts, ids=IDS) -> np.ndarray:
    """The contract, token by token, in float64."""
    x, gates = np.asarray(x, np.float64), np.asarray(gates, np.float64)
    gate, up, down = (np.asarray(w, np.float64) for w in experts)
    y = np.zeros((T, D))
    for t in range(T):
        for j in range(K):
            e = ids[t, j]
            a = x[t] @ gate[e]
            y[t] += gates[t, j] * (a / (1 + np.exp(-a)) * (x[t] @ up[e])) @ down[e]
    return y


def on_mesh(name: str, data: int, expert: int, ids=IDS):
    """(y, loss, gradients of x, gates and experts) as the Learner computes them: inside one program per device."""
    mesh = make_mesh(jax.devices()[: data * expert], data=data, expert=expert)
    rows = PartitionSpec(BATCH_AXES)
    stored = Experts(*map(storage_spec, AXES))

    def program(x, gates, experts, ids, target):
        def objective(x, gates, experts):
            whole = Experts(*map(gather_for_use, experts, AXES))
            y = DISPATCH[name](x, ids, gates, whole)
            return (y * target).sum(), y

        (loss, y), gradients = jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True)(x, gates, experts)
        return y, jax.lax.psum(loss, BATCH_AXES), gradients

    mapped = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(rows, rows, stored, rows, rows),
        out_specs=(rows, PartitionSpec(), (rows, rows, stored)),
    )
    return jax.jit(mapped)(X, GATES, EXPERTS, ids, TARGET)


@pytest.fixture(scope="module")
def oracle():
    """Plain autodiff of one einsum over all experts."""

    def objective(x, gates, experts):
        chosen = jax.nn.one_hot(IDS, E) * gates[..., None]
        hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, experts.gate_EDF))
        hidden = hidden * jnp.einsum("td,edf->tef", x, experts.up_EDF)
        y = jnp.einsum("tef,efd,tke->td", hidden, experts.down_EFD, chosen)
        return (y * TARGET).sum(), y

    (loss, y), gradients = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))(X, GATES, EXPERTS)
    assert relative_error(y, loop(X, GATES, EXPERTS)) < 1e-5
    return y, loss, gradients


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES.keys())
@pytest.mark.parametrize("name", DISPATCH)
def test_values_and_gradients_are_those_of_the_contract(name, sizes, oracle):
    found = on_mesh(name, *sizes)
    errors = jax.tree.map(relative_error, found, oracle)
    assert max(jax.tree.leaves(errors)) < 1e-5, errors


def test_an_expert_that_nobody_chose_gets_no_gradient(oracle):
    experts = oracle[2][2]
    assert (IDS != E - 1).all()
    for name, sizes in (("ring", (2, 4)), ("dense", (2, 4))):
        for leaf, reference in zip(on_mesh(name, *sizes)[2][2], experts, strict=True):
            np.testing.assert_array_equal(leaf[E - 1], 0)
            assert np.abs(reference[0]).max() > 0


def test_no_token_is_dropped_when_all_choose_the_same_experts():
    """The worst load there is: every token goes to the same three experts, which may sit on one device."""
    ids = np.broadcast_to(np.array([0, 1, 2]), (T, K)).copy()
    y = on_mesh("ring", 2, 4, ids)[0]
    assert relative_error(y, loop(X, GATES, EXPERTS, ids)) < 1e-5
