"""The programs of a stage on eight fake devices: those that training and sampling run, and who holds what."""

import dataclasses

import jax
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.flops import forward_flops
from composer_jax.parallel.mesh import make_mesh
from composer_jax.scale.costs import Collective, CostAssumptions, estimate_cost
from composer_jax.scale.programs import LOOP_COUNTS, STAGES, bytes_per_device, expert_buffer_occupancy
from composer_jax.scale.settings import scale_settings
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from tests.scale.configuration import small_config

MESH = make_mesh(data=4, expert=2)


def stage(name, mesh=MESH, **changes):
    return STAGES[name](scale_settings(small_config(**changes)), mesh)


@pytest.mark.parametrize("name", STAGES)
def test_every_program_compiles_and_holds_what_the_compiler_says(name):
    for program in stage(name).programs.values():
        compiled = program.function.trace(*program.arguments, **program.keywords).lower().compile()
        assert compiled.memory_analysis().argument_size_in_bytes == bytes_per_device(program.arguments)


def test_a_real_state_is_what_the_abstract_one_says():
    settings = scale_settings(small_config())
    optimizer = make_optimizer(OptimizerConfig(**dataclasses.asdict(settings.optimizer)), steps=1)
    work = stage("pretrain")
    learner = Learner(work.definition, optimizer, LanguageLoss(), MESH)
    state = learner.init_state(*work.definition.init(0, MESH))
    abstract = work.programs["update"].arguments[0]

    def same(real, said):
        assert (real.shape, real.dtype) == (said.shape, said.dtype)
        assert real.sharding.is_equivalent_to(said.sharding, real.ndim)

    jax.tree.map(same, state, abstract)
    batch = {name: np.zeros(a.shape, a.dtype) for name, a in work.programs["gradient"].arguments[2].items()}
    part = learner.gradient(state.params, state.router_bias, batch, 1)
    jax.tree.map(same, part, work.programs["update"].arguments[1])


def test_the_gradient_keeps_the_optimizer_beside_it():
    work = stage("pretrain")
    gradient = work.programs["gradient"]
    params = sum(leaf.size * 2 for leaf in jax.tree.leaves(work.definition.shapes()[0]))
    # Sharded over at most 8 devices, not less than over none.
    assert params / 8 <= bytes_per_device(gradient.resident["params"]) < params / 3
    moments = 2 * bytes_per_device(gradient.resident["params"])
    assert moments <= bytes_per_device(gradient.resident["optimizer"]) <= moments + 8
    assert bytes_per_device(gradient.resident["params"]) <= bytes_per_device(gradient.outputs["gradient"])
    assert "accumulated" not in gradient.resident


def test_accumulation_keeps_one_more_gradient_and_runs_more_often():
    work = stage("pretrain", batch__accumulate=3)
    gradient = work.programs["gradient"]
    assert gradient.calls_per_step == 3 and work.programs["update"].calls_per_step == 1
    assert bytes_per_device(gradient.resident["accumulated"]) == bytes_per_device(gradient.outputs["gradient"])
    once = stage("pretrain")
    assert (work.tokens, work.flops) == (3 * once.tokens, 3 * once.flops)


def test_model_flops_are_those_of_the_formula():
    config = scale_settings(small_config()).model
    assert stage("pretrain").flops == 3 * 8 * forward_flops(config, 64)
    assert stage("rl", rl__batch__seq_len=32).flops == 3 * 8 * forward_flops(config, 32)
    assert stage("decode").flops == 16 * (forward_flops(config, 256) - forward_flops(config, 255))
    assert (stage("rl").tokens, stage("decode").tokens) == (8 * 64, 16)


def test_the_module_for_the_token_after_next_counts_where_it_trains():
    with_module = dict(model__n_mtp_modules=1)
    config = scale_settings(small_config(**with_module)).model
    trained = stage("pretrain", pretrain__mtp_weight=0.1, **with_module)
    assert trained.flops == 3 * 8 * forward_flops(config, 64)
    assert stage("pretrain", **with_module).flops == stage("pretrain").flops == stage("rl", **with_module).flops


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("pretrain", dict(batch__rows=12), "batch.rows=12 do not divide over 8 devices"),
        ("rl", dict(rl__batch__rows=4), "batch.rows=4 do not divide over 8 devices"),
        ("decode", dict(decode__slots=4), "decode.slots=4 do not divide over 8 devices"),
        (
            "pretrain",
            dict(batch__seq_len=10_000),
            "batch.seq_len=10000 is not between 2 and the model's max_context=8192",
        ),
        ("decode", dict(decode__capacity=10_000), "decode.capacity=10000 is not between 2"),
        ("pretrain", dict(model__d_model=130), "130 embed do not divide over mesh axis data=4"),
    ],
)
def test_sizes_that_do_not_fit_are_named(name, changes, sentence):
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
        stage(name, **changes)


def test_unknown_fields_fail():
    config = small_config().to_dict()
    config["decode"]["slot"] = 3
    with pytest.raises(
        UserError, match="Unknown field config.decode.slot; the fields there are mesh, param_dtype, slots, capacity"
    ):
        scale_settings(config)
    config = small_config().to_dict()
    config["model"]["yarn"] = {"factr": 2.0}
    with pytest.raises(UserError, match="Unknown field config.model.yarn.factr"):
        scale_settings(config)


@pytest.mark.parametrize("sizes", [dict(data=2, expert=4), dict(data=2, expert=2, context=2)], ids=str)
def test_gradients_are_scattered_before_they_are_added_up(sizes):
    """What all devices of an axis add up is never more than one of them stores of a weight."""
    mesh = make_mesh(**sizes)
    work = stage("pretrain", mesh, model__dispatch="ring")
    gradient = work.programs["gradient"]
    jaxpr = gradient.function.trace(*gradient.arguments).jaxpr
    region = estimate_cost(
        jaxpr, CostAssumptions(dict(mesh.shape), expert_buffer_occupancy(work.definition.config, mesh), LOOP_COUNTS)
    )
    sums = [c.bytes for _, c in region.walk() if isinstance(c, Collective) and c.pattern == "all_reduce"]
    stored = [bytes_per_device(leaf) for leaf in jax.tree.leaves(gradient.resident["params"])]
    assert sums and max(sums) <= max(stored)


def test_the_share_of_rows_that_belong_to_somebody():
    def share(**changes):
        return expert_buffer_occupancy(scale_settings(small_config(**changes)).model, MESH)

    assert share(model__capacity_factor=1.25) == 1 / 1.25
    assert share(model__capacity_factor=9.0) == 1 / 2  # all rows of both devices, of which each has half
    assert share(model__dispatch="dense") == 1.0
    alone = make_mesh(jax.devices()[:1])
    assert expert_buffer_occupancy(scale_settings(small_config()).model, alone) == 1.0
