"""The compute dtype on GPUs without bfloat16."""

import dataclasses
import functools

from absl import logging

from composer_jax.models.config import ModelConfig
from composer_jax.ops.local_gpu import local_gpu

BFLOAT16_SINCE = (8, 0)
"""The compute capability from which NVIDIA's GPUs have matrix units for bfloat16 (Ampere; CUDA C++ Programming Guide,
"Compute Capabilities"). T4 is (7, 5) and V100 (7, 0)."""


def supported_network(network: ModelConfig) -> ModelConfig:
    """Returns the network as this process's GPU computes it: in float32 instead of bfloat16 where it lacks that.

    Weights and optimizer state keep their dtypes, because storing bfloat16 takes conversions only. A checkpoint
    therefore has the same arrays on every card, and a run may go on on another one. A warning says so, once a process.
    """
    gpu = local_gpu()
    if gpu is None or gpu.capability >= BFLOAT16_SINCE or network.compute_dtype != "bfloat16":
        return network
    _warn(gpu.kind, ".".join(map(str, gpu.capability)))
    return dataclasses.replace(network, compute_dtype="float32")


@functools.cache
def _warn(kind: str, capability: str) -> None:
    logging.warning(
        "%s (compute capability %s) has no bfloat16: model.compute_dtype='bfloat16' is computed in float32 here. "
        "Weights and checkpoints keep their dtypes, so a run that began on another card goes on, with other rounding.",
        kind,
        capability,
    )
