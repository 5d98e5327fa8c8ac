"""Error and bytes of gradients that devices sum in float32 and in bfloat16 (mesh.reduce_dtype).

    python -m benchmarks.reduce_dtype

A small network in bfloat16 computes the gradient of the same rows on meshes of 2 and 8 CPU devices. The error is the
norm of the difference to the float64 sum of the gradients that one device computes of each device's rows, over the norm
of that sum. With float32 it is the rounding of bfloat16 products that programs of another size compute in another
order. Bytes are those that a device sends for the reduce-scatter of a number of a gathered weight.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import numpy as np

from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.parallel.mesh import Devices, make_mesh
from composer_jax.parallel.platform import configure_cpu
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer

CONFIG = ModelConfig(
    vocab_size=256,
    d_model=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    qk_rope_dim=16,
    v_head_dim=16,
    dense_ff_dim=128,
)
ROWS, LENGTH = 8, 64
ReduceDtype = Literal["float32", "bfloat16"]


def bytes_sent(devices: int, reduce_dtype: ReduceDtype) -> float:
    """Returns the bytes that a device sends in the reduce-scatter of a gradient, per number of the gathered weight."""
    return (devices - 1) / devices * jax.numpy.dtype(reduce_dtype).itemsize


def gradient(
    devices: Devices, reduce_dtype: ReduceDtype, batch: dict[str, np.ndarray], weights: tuple[Params, Params]
) -> list[np.ndarray]:
    """Returns the leaves of the gradient of a batch with its rows and the weights sharded over these devices."""
    mesh = make_mesh(devices, data=len(devices))
    optimizer = make_optimizer(OptimizerConfig(), steps=1)
    learner = Learner(ModelDef(CONFIG), optimizer, LanguageLoss(), mesh, reduce_dtype=reduce_dtype)
    state = learner.init_state(*weights)
    part = learner.gradient(state.params, state.router_bias, batch, ROWS * LENGTH)
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(part["gradient"])]


def error(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Returns the norm of the difference over the norm of what is expected."""
    pairs = list(zip(actual, expected, strict=True))
    return math.sqrt(sum(((a - e) ** 2).sum() for a, e in pairs) / sum((e**2).sum() for _, e in pairs))


def main(argv: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    configure_cpu(8)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, (ROWS, LENGTH), dtype=np.int32)
    batch = {
        "tokens": tokens,
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "segments": np.ones_like(tokens),
        "weights": np.ones((ROWS, LENGTH), np.float32),
    }
    weights = ModelDef(CONFIG).init(0)
    print("| devices | reduce_dtype | error | bytes a number |\n|---|---|---|---|")
    for n in (2, 8):
        size = ROWS // n
        shares = [{name: a[i * size : (i + 1) * size] for name, a in batch.items()} for i in range(n)]
        parts = [gradient(jax.devices()[:1], "float32", share, weights) for share in shares]
        exact = [np.sum(leaves, axis=0) for leaves in zip(*parts, strict=True)]
        for dtype in get_args(ReduceDtype):
            summed = gradient(jax.devices()[:n], dtype, batch, weights)
            print(f"| {n} | {dtype} | {error(summed, exact):.1e} | {bytes_sent(n, dtype):.2f} |")


if __name__ == "__main__":
    main()
