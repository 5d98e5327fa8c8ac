"""The programs of each stage on eight CPU devices: what they hold, count and refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.flops import forward_flops
from composer_jax.parallel.mesh import batch_shards, make_mesh
from composer_jax.parallel.sharding import bytes_per_device
from composer_jax.scale.costs import Collective, CostAssumptions, estimate_cost
from composer_jax.scale.layout import config_layout
from composer_jax.scale.programs import (
    LOOP_COUNTS,
    expert_buffer_occupancy,
    stage_steps,
)
from composer_jax.schema.run_config import run_config
from composer_jax.train.learner import Learner
from composer_jax.train.losses import make_loss
from composer_jax.train.optimizer import make_optimizer
from tests.scale.configuration import small_config

MESH = make_mesh(data=4, expert=2)


@functools.cache
def steps(stage, mesh=MESH, **changes):
    return stage_steps(run_config(small_config(**changes)), stage, lambda _: mesh)


def train_step(stage="pretrain", mesh=MESH, **changes):
    return steps(stage, mesh, **changes)["train"]


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        ("pretrain", ["train"]),
        ("sft", ["train"]),
        ("rl", ["train", "decode", "prefill 16x16"]),
        ("evaluate", ["decode", "prefill 16x16"]),
    ],
)
def test_steps_of_a_stage(stage, names):
    assert list(steps(stage)) == names


def test_a_phase_has_rows_a_mesh_and_a_network_of_its_own():
    config = small_config(stages=("pretrain", "long"))
    phase = {**config["pretrain"], "batch_size": 4, "seq_len": 64, "mesh": {"replica": 1, "data": 4, "context": 2}}
    config["phases"] = {"long": phase | {"model": {"yarn": {"factor": 2.0}}}}
    run = run_config(config)
    step = stage_steps(run, "long", lambda mesh: mesh.make_mesh())["train"]
    assert step.mesh.shape["context"] == 2 and step.tokens == 4 * 64
    assert step.model_def.config.yarn is not None and run.model.yarn is None
    with pytest.raises(UserError, match="--stage=short is unknown; the stages are pretrain, long, sft, rl, evaluate"):
        stage_steps(run, "short", lambda mesh: mesh.make_mesh())


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_every_program_compiles_with_the_arguments_it_counts(stage):
    for name, step in steps(stage).items():
        for program_name, program in step.programs.items():
            compiled = program.function.trace(*program.arguments, **program.keywords).lower().compile()
            arguments = compiled.memory_analysis().argument_size_in_bytes
            counted = bytes_per_device(program.arguments)
            # XLA drops arguments without a use: the output head in prefill, in an update the bfloat16 weights, which
            # are rounded from the master copy, and the weights of the KL where there is no reference.
            if name.startswith("prefill"):
                assert arguments < counted
            elif program_name == "update":
                assert arguments == counted - bytes_per_device(program.resident["params"])
            else:
                unused = program.arguments[2].get("kl_weights", ()) if name == "train" else ()
                assert arguments == counted - bytes_per_device(unused)


def test_the_abstract_state_equals_a_real_one():
    config = run_config(small_config())
    step = train_step()
    optimizer = make_optimizer(config.pretrain.optimizer, steps=1)
    learner = Learner(step.model_def, optimizer, make_loss(config.pretrain.loss), MESH)
    state = learner.init_state(*step.model_def.init(0, MESH))

    def assert_same(real, abstract):
        assert (real.shape, real.dtype) == (abstract.shape, abstract.dtype)
        assert real.sharding.is_equivalent_to(abstract.sharding, real.ndim)

    jax.tree.map(assert_same, state, step.programs["update"].arguments[0])
    batch = {name: np.zeros(a.shape, a.dtype) for name, a in step.programs["gradient"].arguments[2].items()}
    gradient = learner.gradient(state.params, state.router_bias, batch, 1.0)
    jax.tree.map(assert_same, gradient, step.programs["update"].arguments[1])


def test_the_optimizers_state_is_resident_during_the_gradient():
    step = train_step()
    gradient = step.programs["gradient"]
    params = sum(leaf.size * 2 for leaf in jax.tree.leaves(step.model_def.shapes()[0]))
    # Sharded over at most 8 devices, and over more than none.
    assert params / 8 <= bytes_per_device(gradient.resident["params"]) < params / 3
    # Two moments in bfloat16, and the master copy in float32.
    optimizer = 4 * bytes_per_device(gradient.resident["params"])
    assert optimizer <= bytes_per_device(gradient.resident["optimizer"]) <= optimizer + 8
    assert bytes_per_device(gradient.resident["params"]) <= bytes_per_device(gradient.outputs["gradient"])
    assert "accumulated" not in gradient.resident


def test_batches_of_several_shapes_accumulate_one_gradient():
    step = train_step("rl", rl__batches=((32, 16), (64, 8)))
    assert list(step.programs) == ["gradient 16x32", "update", "gradient 8x64"]
    for name in ("gradient 16x32", "gradient 8x64"):
        program = step.programs[name]
        # The sum is float32, the gradient of one batch bfloat16, as the weights are.
        total, part = program.resident["accumulated"]["gradient"], program.outputs["gradient"]["gradient"]
        assert bytes_per_device(total) == 2 * bytes_per_device(part)
    config = run_config(small_config()).model
    assert step.tokens == 16 * 32 + 8 * 64
    assert step.flops == 3 * (16 * forward_flops(config, 32) + 8 * forward_flops(config, 64))


def test_micro_batches_accumulate_one_gradient():
    whole, parts = (train_step("sft", sft__batch_size=16, sft__accumulate=n) for n in (1, 2))
    assert (parts.flops, parts.tokens) == (whole.flops, whole.tokens)
    (one, two) = (step.programs["gradient"] for step in (whole, parts))
    assert (one.calls_per_step, two.calls_per_step) == (1, 2)
    assert bytes_per_device(one.resident["batch"]) > bytes_per_device(two.resident["batch"])
    assert "accumulated" not in one.resident and "accumulated" in two.resident
    with pytest.raises(UserError, match="sft.accumulate=2: layouts are estimated for steps of one batch"):
        config_layout(run_config(small_config(sft__batch_size=16, sft__accumulate=2)), "sft", 8)


def test_the_teacher_of_hints_is_a_part_of_the_batch():
    """One state of the network for each slot of a row, and no more slots than positions."""
    plain = bytes_per_device(train_step("rl").programs["gradient"].resident["batch"])
    config = run_config(small_config())
    (length, rows), itemsize = config.rl.batches[0], jnp.dtype(config.model.compute_dtype).itemsize
    for tokens_per_row, slots in ((4, 4), (10**6, length)):
        step = train_step("rl", rl__feedback__weight=0.5, rl__feedback__tokens_per_row=tokens_per_row)
        program = step.programs["gradient"]
        more = bytes_per_device(program.resident["batch"]) - plain
        shards = batch_shards(step.mesh)
        assert more == rows / shards * slots * (4 + 4 + config.model.d_model * itemsize)
    program.function.trace(*program.arguments, **program.keywords)


def test_model_flops_are_those_of_the_formula():
    config = run_config(small_config()).model
    assert train_step().flops == 3 * 8 * forward_flops(config, 64)
    assert train_step("sft").flops == 3 * 8 * forward_flops(config, 32)
    assert train_step("rl", rl__batches=((32, 8),)).flops == 3 * 8 * forward_flops(config, 32)
    sampler = steps("evaluate")
    assert sampler["decode"].flops == 16 * (forward_flops(config, 32) - forward_flops(config, 31))
    assert sampler["prefill 16x16"].flops == 16 * forward_flops(config, 16)
    assert [step.tokens for step in (train_step("rl"), *sampler.values())] == [8 * 64, 16, 16 * 16]


WITHOUT_EXPERTS = dict(
    model__n_experts=0,
    model__experts_per_token=0,
    model__expert_ff_dim=0,
    model__n_shared_experts=0,
    model__routed_scaling_factor=1.0,
    model__n_dense_layers=0,
    model__dispatch="ring",
)


def test_the_programs_of_a_network_without_experts():
    config = run_config(small_config(**WITHOUT_EXPERTS)).model
    for name, step in steps("rl", **WITHOUT_EXPERTS).items():
        assert step.model_def.parameter_count() == step.model_def.active_parameter_count()
        assert step.model_def.config == config and expert_buffer_occupancy(config, MESH) == 1
        assert step.flops > 0
        for program in step.programs.values():
            program.function.trace(*program.arguments, **program.keywords)
            if "router_bias" in program.resident:
                assert bytes_per_device(program.resident["router_bias"]) == 0, name


def test_mtp_modules_count_where_they_are_trained():
    with_module = dict(model__n_mtp_modules=1)
    config = run_config(small_config(**with_module)).model
    assert train_step(pretrain__loss__mtp_weight=0.1, **with_module).flops == 3 * 8 * forward_flops(config, 64)
    assert train_step(**with_module).flops == train_step().flops == train_step("rl", **with_module).flops


def test_the_sampler_has_its_own_mesh_and_weight_dtype():
    meshes = []

    def make(config):
        meshes.append(config)
        return MESH

    config = run_config(small_config(sampler__param_dtype="float32"))
    decode = stage_steps(config, "rl", make)["decode"]
    assert meshes == [config.mesh, config.sampler.mesh]
    assert decode.model_def.config.param_dtype == "float32" and config.model.param_dtype == "bfloat16"


def test_a_sampler_with_8_bit_weights_keeps_and_gathers_half_the_bytes_of_bfloat16():
    def decode(**changes):
        step = steps("evaluate", mesh=make_mesh(data=8), model__d_model=256, model__vocab_size=64, **changes)["decode"]
        program = step.programs["decode"]
        traced = program.function.trace(*program.arguments, **program.keywords)
        cost = estimate_cost(traced.jaxpr, CostAssumptions(dict(step.mesh.shape), loop_counts=LOOP_COUNTS))
        return bytes_per_device(program.resident["params"]), cost.bytes_sent(step.mesh.shape)["data"]

    kept, gathered = decode(sampler__param_dtype="int8")
    kept_16, gathered_16 = decode()
    assert 0.5 < kept / kept_16 < 0.6 and 0.5 < gathered / gathered_16 < 0.6


@pytest.mark.parametrize(
    ("stage", "changes", "sentence"),
    [
        ("pretrain", dict(pretrain__batch_size=12), "pretrain.batch_size=12 does not divide over 8 devices"),
        ("rl", dict(rl__batches=((64, 4),)), "rl.batches: rows=4 does not divide over 8 devices"),
        ("evaluate", dict(sampler__slots=4), "4 sampler slots do not divide over 8 devices"),
        ("sft", dict(sft__seq_len=10_000), "sft.seq_len=10000 is longer than the context of 8192 tokens"),
        (
            "evaluate",
            dict(sampler__max_model_len=10_000, rl__batches=((16_384, 8),)),
            "sampler.max_model_len=10000 is not between 2",
        ),
        ("pretrain", dict(model__d_model=130), "130 embed do not divide over mesh axis data=4"),
        ("sft", dict(model__attention_form="cudnn"), "attention_form='cudnn' cannot run here, .* platform 'cpu'"),
    ],
)
def test_sizes_that_do_not_fit_are_named(stage, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        steps(stage, **changes)


def test_gradients_are_scattered_before_they_are_added_up():
    """An all_reduce over an axis is never larger than what one device stores of a weight, as float32."""
    mesh = make_mesh(data=2, expert=2, context=2)
    step = train_step("pretrain", mesh, model__dispatch="ring")
    gradient = step.programs["gradient"]
    jaxpr = gradient.function.trace(*gradient.arguments).jaxpr
    occupancy = expert_buffer_occupancy(step.model_def.config, mesh)
    region = estimate_cost(jaxpr, CostAssumptions(dict(mesh.shape), occupancy, LOOP_COUNTS))
    sums = [c.bytes for _, c in region.walk() if isinstance(c, Collective) and c.pattern == "all_reduce"]
    stored = [bytes_per_device(leaf) for leaf in jax.tree.leaves(gradient.resident["params"])]
    assert sums and max(sums) <= 2 * max(stored)  # the weights are bfloat16


def test_occupancy_of_expert_buffers():
    def occupancy(**changes):
        return expert_buffer_occupancy(run_config(small_config(**changes)).model, MESH)

    assert occupancy(model__capacity_factor=1.25) == 1 / 1.25
    assert occupancy(model__capacity_factor=9.0) == 1 / 2  # all rows of both devices, of which each has half
    assert occupancy(model__dispatch="dense") == 1.0
    alone = make_mesh(jax.devices()[:1])
    assert expert_buffer_occupancy(run_config(small_config()).model, alone) == 1.0
