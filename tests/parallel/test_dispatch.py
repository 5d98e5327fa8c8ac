"""Expert dispatch: every implementation on every mesh equals the sum over chosen experts, in values and gradients."""

import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from composer_jax.errors import UserError
from composer_jax.ops.activation import clamped_swiglu, swiglu
from composer_jax.parallel.dispatch import DISPATCH, Biases, Dispatch, Experts
from composer_jax.parallel.dispatch.ragged import ragged_all_to_all, receive_capacity
from composer_jax.parallel.mesh import BATCH_AXES, make_mesh
from composer_jax.parallel.sharding import EXPERT_AXES, all_gather_fsdp, storage_spec
from tests.models.small import relative_error
from tests.parallel.ragged_emulator import emulate_ragged_all_to_all

T, D, F, E, K = 32, 8, 3, 8, 3
RNG = np.random.default_rng(0)
X = RNG.standard_normal((T, D)).astype(np.float32)
# Unbalanced: most tokens choose the first experts, and none the last.
POPULARITY = np.array([6, 5, 4, 3, 2, 1, 1, 0]) / 22
IDS = np.stack([RNG.choice(E, K, replace=False, p=POPULARITY) for _ in range(T)])
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
    "swiglu": (Experts(*MATRICES), dataclasses.replace(AXES, biases=None), swiglu),
    "biases_clamped": (Experts(*MATRICES, BIASES), AXES, clamped_swiglu(0.7)),
}
TARGET = RNG.standard_normal((T, D)).astype(np.float32)
# Sizes of data, expert and tensor.
MESHES = {"8x1": (8, 1, 1), "1x8": (1, 8, 1), "2x4": (2, 4, 1), "4x2": (4, 2, 1), "1x1": (1, 1, 1)}
TENSOR_MESHES = {"2x2x2": (2, 2, 2), "1x4x2": (1, 4, 2), "2x1x4": (2, 1, 4)}
# XLA has no ragged collective on CPUs, so it is emulated; tests/parallel/test_ragged.py tests its plan.
EMULATED = functools.partial(ragged_all_to_all, collective=emulate_ragged_all_to_all)
FORMS = DISPATCH | {"ragged_all_to_all": Dispatch(EMULATED, may_drop=True)}
ENOUGH = 8.0  # a capacity factor at which nothing here is dropped


def is_axes(node) -> bool:
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)


def loop(case: str, ids=IDS) -> np.ndarray:
    """Computes the contract token by token in float64."""
    experts, _, _ = CASES[case]
    biases = experts.biases or Biases(np.zeros((E, F)), np.zeros((E, F)), np.zeros((E, D)))
    matrices = experts.gate_EDF, experts.up_EDF, experts.down_EFD
    x, gates, gate, up, down, *biases = (np.asarray(a, np.float64) for a in (X, GATES, *matrices, *biases))
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


def mesh_of(data: int, expert: int, tensor: int):
    return make_mesh(jax.devices()[: data * expert * tensor], data=data, expert=expert, tensor=tensor)


def program_on(sizes, name: str, case: str, **options):
    """(x, gates, experts, ids, target) -> (y, gradients of x, gates and experts), dropped pairs of each device.

    As the Learner computes them: inside one program per device.
    """
    rows = PartitionSpec(BATCH_AXES)
    _, axes, activation = CASES[case]
    mesh = mesh_of(*sizes)
    stored = jax.tree.map(lambda axes: storage_spec(mesh, axes), axes, is_leaf=is_axes)

    def program(x, gates, experts, ids, target):
        def objective(x, gates, experts):
            whole = jax.tree.map(all_gather_fsdp, experts, axes)
            actual = FORMS[name](x, ids, gates, whole, activation, **options)
            return (actual.y_TD * target).sum(), actual

        gradients, actual = jax.grad(objective, argnums=(0, 1, 2), has_aux=True)(x, gates, experts)
        return (actual.y_TD, gradients), actual.dropped[None]

    return jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(rows, rows, stored, rows, rows),
        out_specs=((rows, (rows, rows, stored)), rows),
    )


@functools.cache
def jitted(sizes, name: str, case: str, **options):
    return jax.jit(program_on(sizes, name, case, **options))


def on_mesh(name: str, case: str, sizes, ids=IDS, x=X, gates=GATES, target=TARGET, capacity_factor=ENOUGH):
    """Returns the jitted result of program_on, and the sum of dropped pairs."""
    program = jitted(sizes, name, case, capacity_factor=capacity_factor)
    actual, dropped = program(x, gates, CASES[case][0], ids, target)
    return actual, float(dropped.sum())


def einsum_of_all(case: str, ids=IDS, x=X, gates=GATES, target=TARGET):
    """Returns (y, gradients) of one einsum over all experts, by autodiff."""
    experts, _, activation = CASES[case]

    def objective(x, gates, experts):
        chosen = jax.nn.one_hot(ids, E) * gates[..., None]
        biases = experts.biases or Biases(*map(jnp.zeros_like, BIASES))
        gate = jnp.einsum("td,edf->tef", x, experts.gate_EDF) + biases.gate_EF
        up = jnp.einsum("td,edf->tef", x, experts.up_EDF) + biases.up_EF
        each = jnp.einsum("tef,efd->ted", activation(gate, up), experts.down_EFD) + biases.down_ED
        y = jnp.einsum("ted,tke->td", each, chosen)
        return (y * target).sum(), y

    gradients, y = jax.jit(jax.grad(objective, argnums=(0, 1, 2), has_aux=True))(x, gates, experts)
    return y, gradients


def assert_equal(actual, expected):
    errors = jax.tree.map(relative_error, actual, expected)
    assert max(jax.tree.leaves(errors)) < 1e-5, errors


@functools.cache
def expected(case: str):
    actual = einsum_of_all(case)
    assert relative_error(actual[0], loop(case)) < 1e-5
    return actual


def assert_contract(name: str, case: str, sizes):
    actual, dropped = on_mesh(name, case, sizes)
    assert_equal(actual, expected(case))
    assert dropped == 0


# Every form on two meshes that cut most axes, and every other mesh with at least one form.
ON_MESHES = [(name, mesh) for name in FORMS for mesh in ("2x4", "2x2x2")] + [
    *(("dense", mesh) for mesh in ("1x1", "8x1")),
    *(("ring", mesh) for mesh in ("1x8", "4x2", "1x4x2")),
    *(("ragged_all_to_all", mesh) for mesh in ("1x8", "1x4x2", "2x1x4")),
]


@pytest.mark.parametrize(("name", "mesh"), ON_MESHES)
def test_values_and_gradients_are_those_of_the_contract(name, mesh):
    assert_contract(name, "biases_clamped", (MESHES | TENSOR_MESHES)[mesh])


@pytest.mark.parametrize("name", FORMS)
def test_experts_without_biases(name):
    assert_contract(name, "swiglu", (2, 4, 1))


@pytest.mark.parametrize("name", FORMS)
def test_experts_stored_along_a_tensor_axis_of_one(name):
    """They are typed as varying over that axis (VMA), which the output must not be."""
    rows, experts = PartitionSpec(BATCH_AXES), PartitionSpec(EXPERT_AXES)
    mapped = jax.shard_map(
        lambda x, ids, gates, experts: FORMS[name](x, ids, gates, experts, capacity_factor=ENOUGH).y_TD,
        mesh=mesh_of(2, 4, 1),
        in_specs=(rows, rows, rows, experts),
        out_specs=rows,
    )
    assert relative_error(jax.jit(mapped)(X, IDS, GATES, Experts(*MATRICES)), loop("swiglu")) < 1e-5


@pytest.mark.parametrize(
    ("case", "sizes", "capacity_factor"),
    [
        ("swiglu", (2, 2, 2), 0.1),
        *(("biases_clamped", (1, 8, 1), factor) for factor in (0.1, 0.4, 1.0)),
    ],
    ids=str,
)
def test_a_ring_takes_as_many_rounds_as_it_needs(case, sizes, capacity_factor):
    """A buffer for a tenth of the mean, which is filled many times; nothing is dropped."""
    actual, dropped = on_mesh("ring", case, sizes, capacity_factor=capacity_factor)
    assert_equal(actual, expected(case))
    assert dropped == 0


def test_tokens_that_do_not_divide_over_tensor():
    """Six tokens per device for four that share them."""
    some = dict(ids=IDS[:12], x=X[:12], gates=GATES[:12], target=TARGET[:12])
    actual, dropped = on_mesh("ragged_all_to_all", "biases_clamped", (1, 2, 4), **some)
    assert_equal(actual, einsum_of_all("biases_clamped", **some))
    assert dropped == 0


@pytest.mark.parametrize(("name", "sizes"), [*((name, (2, 2, 2)) for name in FORMS), ("ring", (1, 1, 1))], ids=str)
def test_pairs_without_an_expert_add_nothing(name, sizes):
    """Expert -1: all of one token's choices, and the first of a few others."""
    ids = IDS.copy()
    ids[5], ids[20:, 0] = -1, -1
    actual, dropped = on_mesh(name, "biases_clamped", sizes, ids=ids)
    assert_equal(actual, einsum_of_all("biases_clamped", ids=ids))
    np.testing.assert_array_equal(actual[0][5], 0)
    assert dropped == 0


@pytest.mark.parametrize("name", FORMS)
def test_programs_without_vma_checks(name):
    """As in the sampler: without the types, no error would show a missing psum."""
    rows, experts = PartitionSpec(BATCH_AXES), PartitionSpec(EXPERT_AXES)
    mapped = jax.shard_map(
        lambda x, ids, gates, experts: FORMS[name](x, ids, gates, experts, capacity_factor=ENOUGH).y_TD,
        mesh=mesh_of(2, 2, 2),
        in_specs=(rows, rows, rows, experts),
        out_specs=rows,
        check_vma=False,
    )
    assert relative_error(jax.jit(mapped)(X, IDS, GATES, Experts(*MATRICES)), loop("swiglu")) < 1e-5


@pytest.mark.parametrize("name", FORMS)
def test_an_unchosen_expert_gets_no_gradient(name):
    assert (IDS != E - 1).all()
    actual = on_mesh(name, "biases_clamped", (2, 4, 1))[0][1][2]
    for leaf, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected("biases_clamped")[1][2]), strict=True):
        np.testing.assert_array_equal(leaf[E - 1], 0)
        assert np.abs(reference[0]).max() > 0


def test_gradients_of_biases_are_summed_in_float32():
    """Thousands of tokens share an expert's bias; their gradients, all of one sign here, are added up in float32."""
    rows = 4096
    x = RNG.standard_normal((rows, D)).astype(np.float32)
    ids, gates = np.tile([[0, 1]], (rows, 1)), np.full((rows, 2), 0.5, np.float32)
    experts = Experts(*(w[:2] for w in MATRICES), Biases(*(b[:2] for b in BIASES)))

    def gradient(dtype):
        whole = jax.tree.map(lambda w: jnp.asarray(w, dtype), experts)
        ring = lambda experts: DISPATCH["ring"](jnp.asarray(x, dtype), ids, gates, experts, swiglu).y_TD  # noqa: E731
        objective = lambda experts: ring(experts).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(objective)(whole).biases.down_ED.astype(jnp.float32)

    assert relative_error(gradient(jnp.bfloat16), gradient(jnp.float32)) < 0.01


@pytest.mark.parametrize("case", CASES)
def test_no_token_is_dropped_when_all_choose_the_same_experts(case):
    """The worst load there is: every token goes to the same three experts, which may sit on one device."""
    ids = np.broadcast_to(np.array([0, 1, 2]), (T, K)).copy()
    actual, dropped = on_mesh("ring", case, (2, 4, 1), ids=ids, capacity_factor=0.1)
    assert relative_error(actual[0], loop(case, ids)) < 1e-5
    assert dropped == 0


# -- What is dropped. Capacities are multiples of eight, so there have to be more tokens.

MANY = 256
CROWD = dict(
    ids=np.stack([RNG.choice(E, K, replace=False, p=POPULARITY) for _ in range(MANY)]),
    x=RNG.standard_normal((MANY, D)).astype(np.float32),
    gates=RNG.random((MANY, K)).astype(np.float32),
    target=RNG.standard_normal((MANY, D)).astype(np.float32),
)


def kept_pairs(sizes, factor: float) -> np.ndarray:
    """Which pairs have room, bool [MANY,K]: counted one by one, in the order that the docstrings promise."""
    data, expert, tensor = sizes
    devices, experts = expert * tensor, E // (expert * tensor)
    parts = CROWD["ids"].reshape(data, devices, -1, K)  # rows go to data, expert and, within a device's, tensor
    tokens = parts.shape[2]
    kept = np.zeros(parts.shape, bool)
    for group in range(data):
        arrived = np.zeros(devices, int)
        for sender in range(devices):
            for t, j in np.ndindex(tokens, K):
                receiver = parts[group, sender, t, j] // experts
                if arrived[receiver] < receive_capacity(tokens, K, devices, experts, factor):
                    arrived[receiver] += 1
                    kept[group, sender, t, j] = True
    return kept.reshape(MANY, K)


@pytest.mark.parametrize("sizes", [(2, 4, 1), (1, 2, 4)], ids=str)
def test_what_does_not_fit_is_counted_and_counts_as_gate_zero(sizes):
    factor = 0.7
    kept = kept_pairs(sizes, factor)
    assert MANY * K / 10 < (~kept).sum() < MANY * K / 2
    actual, dropped = on_mesh("ragged_all_to_all", "biases_clamped", sizes, **CROWD, capacity_factor=factor)
    y, (dx, dgates, dexperts) = einsum_of_all("biases_clamped", **(CROWD | {"gates": CROWD["gates"] * kept}))
    assert dropped == (~kept).sum()
    assert_equal(actual, (y, (dx, dgates * kept, dexperts)))


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        # tokens, choices, devices, experts of each, factor
        ((256, 8, 16, 24, 2.0), 4096),
        ((256, 8, 16, 24, 1.01), 2072),  # 2068.48, in eights
        ((256, 8, 2, 1, 4.0), 512),  # a token can choose one expert there
        ((1, 2, 16, 24, 2.0), 8),
        ((3, 2, 2, 1, 1.0), 6),  # eights would be more than there can be
    ],
    ids=str,
)
def test_capacities(arguments, rows):
    assert receive_capacity(*arguments) == rows


# -- Operands.


@pytest.mark.parametrize("name", FORMS)
def test_operands_of_wrong_shapes_are_named(name):
    with pytest.raises(AssertionError, match=r"gates_Tk is float32\[32, 2\], not \[T,k\] with T=32, k=3"):
        FORMS[name](X, IDS, GATES[:, :2], Experts(*MATRICES))
    with pytest.raises(AssertionError, match="ids_Tk is float32"):
        FORMS[name](X, GATES, GATES, Experts(*MATRICES))


# -- What the programs are made of.

COLLECTIVES = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "collective_permute")


def lowered(name: str, sizes) -> str:
    program = jax.jit(program_on(sizes, name, "swiglu", capacity_factor=ENOUGH))
    return program.lower(X, GATES, Experts(*MATRICES), IDS, TARGET).as_text()


@pytest.mark.parametrize("name", DISPATCH)
def test_a_single_device_has_no_collectives(name):
    mesh = mesh_of(1, 1, 1)
    program = jax.jit(
        jax.shard_map(
            lambda x, ids, gates, *experts: DISPATCH[name](x, ids, gates, Experts(*experts)).y_TD,
            mesh=mesh,
            in_specs=(*[PartitionSpec(BATCH_AXES)] * 3, *[storage_spec(mesh, ("experts", None, None))] * 3),
            out_specs=PartitionSpec(BATCH_AXES),
        )
    )
    text = program.lower(X, IDS, GATES, *MATRICES).as_text()
    assert not [word for word in COLLECTIVES if word in text]
    assert "all_gather" in lowered("ring", (2, 4, 1))


def scatters_of_rows(jaxpr) -> list[str]:
    """The scatters in a program for CPUs or TPUs; the grouped product of GPUs (ops/group_rounds.py) has some."""
    actual = []
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("scatter") and equation.invars[0].aval.ndim > 1:
            actual.append(str(equation))
        programs = list(jax.extend.core.jaxprs_in_params(equation.params))
        if equation.params.get("branches_platforms"):
            programs.pop()  # the branch of all other platforms
        actual.extend(scatter for inner in programs for scatter in scatters_of_rows(inner))
    return actual


@pytest.mark.parametrize("name", ["ring", "ragged_all_to_all"])
def test_rows_are_gathered_in_both_directions(name):
    program = program_on((1, 4, 2), name, "swiglu", capacity_factor=ENOUGH)
    assert scatters_of_rows(jax.make_jaxpr(program)(X, GATES, Experts(*MATRICES), IDS, TARGET).jaxpr) == []
    plain = jax.make_jaxpr(jax.grad(lambda x: x[IDS].sum()))(X)
    assert len(scatters_of_rows(plain.jaxpr)) == 1


def test_ragged_dispatch_is_refused_on_cpus():
    mesh_program = jax.shard_map(
        lambda x, ids, gates, *experts: DISPATCH["ragged_all_to_all"](x, ids, gates, Experts(*experts)).y_TD,
        mesh=mesh_of(2, 4, 1),
        in_specs=(*[PartitionSpec(BATCH_AXES)] * 3, *[PartitionSpec("expert")] * 3),
        out_specs=PartitionSpec(BATCH_AXES),
    )
    with pytest.raises(UserError, match="CPU devices; use 'ring'"):
        jax.eval_shape(mesh_program, X, IDS, GATES, *MATRICES)
