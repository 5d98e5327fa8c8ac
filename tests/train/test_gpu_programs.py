"""Training steps lowered for an H100 without one: fused kernels, few shapes of products, and no scores of whole rows.

XLA for GPUs compiles and tunes every shape of a product by itself, so that their number is what a first step waits for.
"""

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest

from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from composer_jax.models.presets import PRESETS
from composer_jax.ops import packed_attention
from composer_jax.ops.local_gpu import LocalGpu
from composer_jax.parallel.mesh import make_mesh
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from tests.ops.hopper_interpreter import pretend_h100

MOST_SHAPES = 60
SMOLLM2 = dataclasses.replace(PRESETS["smollm2_135m"], compute_dtype="bfloat16"), 16, 2048
QWEN3 = dataclasses.replace(PRESETS["qwen3_30b_a3b"], n_layers=4, compute_dtype="bfloat16"), 8, 4096
"""Network, rows and tokens of a row."""


def lower_step(config: ModelConfig, rows: int, length: int) -> tuple[str, str]:
    """Returns the StableHLO for CUDA of a training step's gradient and update, at abstract arguments."""
    optimizer, mesh = make_optimizer(OptimizerConfig(), steps=1), make_mesh(jax.local_devices()[:1])
    learner = Learner(ModelDef(config), optimizer, LanguageLoss(), mesh)
    dtypes = {"tokens": np.int32, "positions": np.int32, "segments": np.int32, "weights": np.float32}
    batch = {name: jax.ShapeDtypeStruct((rows, length), dtype) for name, dtype in dtypes.items()}

    def lower(function, arguments, keywords) -> str:
        return function.trace(*arguments, **keywords).lower(lowering_platforms=("cuda",)).as_text()

    programs = learner.programs(batch)
    return lower(*programs["gradient"]), lower(*programs["update"])


def product_shapes(text: str) -> collections.Counter[str]:
    """Returns how often each shape of a product stands in a program, with its contracted axes."""
    products = re.findall(r"stablehlo\.dot_general %\S+, %\S+, (.*) : (\(.*\) -> \S+)", text)
    assert len(products) == text.count("stablehlo.dot_general")
    return collections.Counter(" ".join(product) for product in products)


def custom_calls(text: str) -> collections.Counter[str]:
    return collections.Counter(re.findall(r"stablehlo\.custom_call @([\w.$]+)", text))


def token_squares(text: str, length: int) -> set[str]:
    """Returns the types of arrays that have two axes of a whole row."""
    types = set(re.findall(r"tensor<((?:\d+x)+)[a-z]\w*>", text))
    return {dims for dims in types if dims.split("x").count(str(length)) > 1}


@pytest.fixture
def on_h100(monkeypatch):
    pretend_h100(monkeypatch)
    monkeypatch.setattr(packed_attention, "local_gpu", lambda: LocalGpu("NVIDIA H100 80GB HBM3", (9, 0), 91002))


@pytest.mark.usefixtures("on_h100")
@pytest.mark.parametrize("network", [SMOLLM2, QWEN3], ids=["smollm2", "qwen3"])
def test_a_training_step_has_fused_kernels_and_few_products(network):
    config, _, length = network
    gradient, update = lower_step(*network)
    shapes, calls = product_shapes(gradient), custom_calls(gradient)
    assert len(shapes) <= MOST_SHAPES, "shapes"
    assert shapes.total() <= MOST_SHAPES, "layers are one loop"
    assert not product_shapes(update)
    assert not token_squares(gradient, length)
    assert {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"} <= calls.keys()
    # Of one width in and out: the product, and its gradients of rows and matrices. gate and up share theirs.
    assert calls["mosaic_gpu_v2"] >= (6 if config.n_experts else 0)
    assert not [shape for shape in shapes if "(tensor<128x" in shape], "blocks of every expert"
    # TF32 has half of the rate of bfloat16. The router's products are float32 on purpose.
    assert not [shape for shape in shapes if "DEFAULT" in shape and "f32>, " in shape]


def test_what_the_test_above_looks_for_is_there_without_a_gpu():
    """In plain attention, the blocks of every expert, and products of float32 gradients."""
    config, rows, length = QWEN3
    gradient, _ = lower_step(dataclasses.replace(config, n_layers=1), rows, length)
    shapes = product_shapes(gradient)
    assert len(shapes) > MOST_SHAPES
    assert [shape for shape in shapes if "(tensor<128x" in shape]
    assert [shape for shape in shapes if "DEFAULT" in shape and "f32>, " in shape]
    one_block, _ = lower_step(dataclasses.replace(SMOLLM2[0], n_layers=1), 1, 128)
    assert token_squares(one_block, 128)
