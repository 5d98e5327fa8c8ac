"""The memory of a step, against what XLA plans for the step's programs on a CPU."""

import dataclasses

import jax
import numpy as np
import pytest

from composer_jax.models.model_def import ModelDef
from composer_jax.ops.attention_form import FormChoice
from composer_jax.ops.cudnn_attention import backward_workspace
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.sharding import bytes_per_device
from composer_jax.train import step_memory
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from composer_jax.train.step_memory import StepMemory, StepMemoryEstimator, arrays_in
from tests.models.small import LLAMA, small

NETWORK = small(**LLAMA, n_layers=4, d_model=64, remat=True)


def planned_bytes(program) -> float:
    """The arguments, results and temporaries of a program on one device."""
    function, arguments, keywords = program
    memory = function.lower(*arguments, **keywords).compile().memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes


def make_learner(*, offload: bool = False) -> Learner:
    optimizer = make_optimizer(OptimizerConfig(offload=offload), 1)
    return Learner(ModelDef(NETWORK), optimizer, LanguageLoss(), make_mesh(jax.devices()[:1]))


@pytest.mark.parametrize(
    ("sizes", "accumulates", "network"),
    [({}, False, {}), ({"data": 2}, True, {"param_dtype": "bfloat16", "compute_dtype": "bfloat16", "remat": False})],
    ids=["float32", "bfloat16 over two devices, accumulated"],
)
def test_the_state_is_exact_and_the_least_is_not_above_what_a_step_takes(sizes, accumulates, network):
    rows, tokens = 32, 64
    mesh = make_mesh(jax.devices()[: 2 if sizes else 1], **sizes)
    optimizer = make_optimizer(OptimizerConfig(), steps=1)
    learner = Learner(ModelDef(dataclasses.replace(NETWORK, **network)), optimizer, LanguageLoss(), mesh)
    estimator = StepMemoryEstimator(learner)
    memory = estimator.estimate(rows, tokens, accumulates=accumulates)
    batch = {name: jax.ShapeDtypeStruct((rows, tokens), np.int32) for name in ("tokens", "positions", "segments")}
    batch["weights"] = jax.ShapeDtypeStruct((rows, tokens), np.float32)
    programs = learner.programs(batch, accumulates=accumulates)
    # A second batch finds the gradient of the first one, in the dtype of the weights.
    beside = bytes_per_device(learner.abstract_state().optimizer) + memory.gradient * accumulates
    whole = planned_bytes(programs["gradient"]) + beside
    assert memory.layer_inputs > memory.gradient, "otherwise the lower bound would say nothing about activations"
    assert memory.least <= whole and memory.least < memory.estimate
    # The update reads the gradient or the sum of several, and the state without weights of which it has a master copy.
    update = memory.state + (memory.summed or memory.gradient)
    update -= bytes_per_device(learner.abstract_state().params) if learner.master_dtype else 0.0
    function, arguments, keywords = programs["update"]
    read = function.lower(*arguments, **keywords).compile().memory_analysis().argument_size_in_bytes
    assert update <= read <= 1.01 * update + 256


def test_what_stays_in_memory_beside_the_learner_and_what_is_not_trained():
    learner = make_learner()
    plain, more = (StepMemoryEstimator(learner, beside=b).estimate(4, 16, accumulates=False) for b in (0.0, 1e6))
    assert plain.layer_inputs < plain.gradient and plain.least == plain.exact, "the gradient may take their place"
    assert more.least == plain.least + 1e6 and more.exact == plain.exact + 1e6
    modules_alone = StepMemoryEstimator(learner, trains_trunk=False).estimate(4, 16, accumulates=False)
    assert modules_alone.layer_inputs == 0 and modules_alone.estimate < plain.estimate
    twice = StepMemoryEstimator(learner).estimate(8, 16, accumulates=False)
    assert twice.layer_inputs == 2 * plain.layer_inputs and twice.exact == plain.exact


def test_the_inputs_of_layers_are_never_beside_the_float32_sum_of_two_bfloat16_gradients():
    def least(summed, layer_inputs):
        return StepMemory(10.0, summed, 4.0, layer_inputs, activations=50.0, update=0.0).least

    assert least(8.0, 20.0) == 10 + 4 + 20, "the second backward pass beside the first gradient"
    assert least(8.0, 3.0) == 10 + 8 + 4, "the sum beside the last gradient"
    assert (least(0.0, 20.0), least(0.0, 3.0)) == (30, 14)


def test_the_update_has_copies_of_the_state_in_the_hosts_memory():
    offloads = make_learner(offload=True)
    moments = bytes_per_device(arrays_in(offloads.abstract_state(), host=True))
    kept, moved = (StepMemoryEstimator(of).estimate(1, 16, accumulates=False) for of in (make_learner(), offloads))
    assert moved.state == kept.state - moments and moved.activations == kept.activations < 2 * moments
    assert moved.estimate == moved.exact + 2 * moments
    large = StepMemoryEstimator(offloads).estimate(64, 64, accumulates=False)
    assert large.estimate == large.exact + large.activations, "which are free before the update"


def test_the_form_of_attention_decides_what_it_has_beside_queries_keys_and_values(monkeypatch):
    def activations(form, rows):
        monkeypatch.setattr(step_memory, "attention_form", lambda config, mesh, tokens: FormChoice(form, ""))
        return StepMemoryEstimator(make_learner()).estimate(rows, 4096, accumulates=False).activations

    heads, width = NETWORK.n_heads, NETWORK.qk_nope_dim + NETWORK.qk_rope_dim
    tokens, itemsize = 2 * 4096, NETWORK.dtype.itemsize
    partial = heads * tokens * width * 2 * itemsize  # 4096 tokens are two parts
    scores = heads * tokens * 4096 / 2 * (4 + itemsize)
    splash, cudnn, plain = (activations(form, 2) for form in ("splash", "cudnn", "plain"))
    assert plain - splash == pytest.approx(step_memory.TEMPORARIES * (scores - partial))
    workspace = backward_workspace(2, 4096, heads, NETWORK.n_kv_heads or heads, max(width, NETWORK.v_head_dim))
    assert cudnn - splash == pytest.approx(workspace - step_memory.TEMPORARIES * partial)
