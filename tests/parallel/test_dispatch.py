"""Expert dispatch: every form on every mesh is the sum over chosen experts, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from composer_jax.ops.activation import clamped_swiglu, swiglu
from composer_jax.parallel.dispatch import DISPATCH, Biases, Experts
from composer_jax.parallel.mesh import BATCH_AXES, make_mesh
from composer_jax.parallel.sharding import gather_for_use, storage_spec
from tests.models.small import relative_error

T, D, F, E, K = 32, 8, 3, 8, 3
RNG = np.random.default_rng(0)
X = RNG.standard_normal((T, D)).astype(np.float32)
# Lopsided: most tokens choose the first experts, the last is chosen by nobody.
IDS = np.stack([RNG.choice(E, K, replace=False, p=np.array([6, 5, 4, 3, 2, 1, 1, 0]) / 22) for _ in range(T)])
GATES = RNG.random((T, K)).astype(np.float32)
MATRICES = [RNG.standard_normal(shape).astype(np.float32) for shape in ((E, D, F), (E, D, F), (E, F, D))]
BIASES = Biases(*(RNG.standard_normal(shape).astype(np.float32) for shape in ((E, F), (E, F), (E, D))))
AXES = Experts(
    ("experts", "embed", None),
    ("experts", "embed", None),
    ("experts", None, "embed"),
    Biases(("experts", None), ("experts", None), ("experts", "embed")),
)
CASES = {
    "swiglu": (Experts(*MATRICES), AXES._replace(biases=None), swiglu),
    "biases_clamped": (Experts(*MATRICES, BIASES), AXES, clamped_swiglu(0.7)),
}
TARGET = RNG.standard_normal((T, D)).astype(np.float32)
MESHES = {"8x1": (8, 1), "1x8": (1, 8), "2x4": (2, 4), "4x2": (4, 2), "1x1": (1, 1)}


def is_axes(node) -> bool:
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)


def loop(case: str, ids=IDS) -> np.ndarray:
    """The contract, token by token, in float64."""
    experts, _, _ = CASES[case]
    biases = experts.biases or Biases(np.zeros((E, F)), np.zeros((E, F)), np.zeros((E, D)))
    x, gates, gate, up, down, *biases = (np.asarray(a, np.float64) for a in (X, GATES, *experts[:3], *biases))
    y = np.zeros((T, D))
    for t in range(T):
        for j in range(K):
            e = ids[t, j]
            a, b = x[t] @ gate[e] + biases[0][e], x[t] @ up[e] + biases[1][e]
            if case == "swiglu":
                hidden = a / (1 + np.exp(-a)) * b
            else:
                a, b = np.minimum(a, 0.7), np.clip(b, -0.7, 0.7)
                hidden = a / (1 + np.exp(-1.702 * a)) * (b + 1)
            y[t] += gates[t, j] * (hidden @ down[e] + biases[2][e])
    return y


def on_mesh(name: str, case: str, data: int, expert: int, ids=IDS):
    """(y, loss, gradients of x, gates and experts) as the Learner computes them: inside one program per device."""
    mesh = make_mesh(jax.devices()[: data * expert], data=data, expert=expert)
    rows = PartitionSpec(BATCH_AXES)
    experts, axes, activation = CASES[case]
    stored = jax.tree.map(lambda axes: storage_spec(mesh, axes), axes, is_leaf=is_axes)

    def program(x, gates, experts, ids, target):
        def objective(x, gates, experts):
            whole = jax.tree.map(gather_for_use, experts, axes)
            y = DISPATCH[name](x, ids, gates, whole, activation)
            return (y * target).sum(), y

        (loss, y), gradients = jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True)(x, gates, experts)
        return y, jax.lax.psum(loss, BATCH_AXES), gradients

    mapped = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(rows, rows, stored, rows, rows),
        out_specs=(rows, PartitionSpec(), (rows, rows, stored)),
    )
    return jax.jit(mapped)(X, GATES, experts, ids, TARGET)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """(name, what one einsum over all experts and plain autodiff give)."""
    experts, _, activation = CASES[request.param]

    def objective(x, gates, experts):
        chosen = jax.nn.one_hot(IDS, E) * gates[..., None]
        biases = experts.biases or Biases(*map(jnp.zeros_like, BIASES))
        gate = jnp.einsum("td,edf->tef", x, experts.gate_EDF) + biases.gate_EF
        up = jnp.einsum("td,edf->tef", x, experts.up_EDF) + biases.up_EF
        each = jnp.einsum("tef,efd->ted", activation(gate, up), experts.down_EFD) + biases.down_ED
        y = jnp.einsum("ted,tke->td", each, chosen)
        return (y * TARGET).sum(), y

    (loss, y), gradients = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))(X, GATES, experts)
    assert relative_error(y, loop(request.param)) < 1e-5
    return request.param, (y, loss, gradients)


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES.keys())
@pytest.mark.parametrize("name", DISPATCH)
def test_values_and_gradients_are_those_of_the_contract(name, sizes, case):
    found = on_mesh(name, case[0], *sizes)
    errors = jax.tree.map(relative_error, found, case[1])
    assert max(jax.tree.leaves(errors)) < 1e-5, errors


@pytest.mark.parametrize("name", DISPATCH)
def test_an_expert_that_nobody_chose_gets_no_gradient(name, case):
    assert (IDS != E - 1).all()
    found = on_mesh(name, case[0], 2, 4)[2][2]
    for leaf, reference in zip(jax.tree.leaves(found), jax.tree.leaves(case[1][2][2]), strict=True):
        np.testing.assert_array_equal(leaf[E - 1], 0)
        assert np.abs(reference[0]).max() > 0


def test_gradients_of_biases_do_not_drown_in_bfloat16():
    """Thousands of tokens share an expert's bias; their gradients, all of one sign here, are added up in float32."""
    rows = 4096
    x = RNG.standard_normal((rows, D)).astype(np.float32)
    ids, gates = np.tile([[0, 1]], (rows, 1)), np.full((rows, 2), 0.5, np.float32)
    experts = Experts(*(w[:2] for w in MATRICES), Biases(*(b[:2] for b in BIASES)))

    def gradient(dtype):
        whole = jax.tree.map(lambda w: jnp.asarray(w, dtype), experts)
        objective = lambda e: DISPATCH["ring"](jnp.asarray(x, dtype), ids, gates, e, swiglu).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(objective)(whole).biases.down_ED.astype(jnp.float32)

    assert relative_error(gradient(jnp.bfloat16), gradient(jnp.float32)) < 0.01


@pytest.mark.parametrize("case", CASES)
def test_no_token_is_dropped_when_all_choose_the_same_experts(case):
    """The worst load there is: every token goes to the same three experts, which may sit on one device."""
    ids = np.broadcast_to(np.array([0, 1, 2]), (T, K)).copy()
    assert relative_error(on_mesh("ring", case, 2, 4, ids)[0], loop(case, ids)) < 1e-5
