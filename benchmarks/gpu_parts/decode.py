"""A decode step of the rollout engine with SmolLM2-135M's shape in bfloat16, contexts of 512 tokens."""

import dataclasses

import jax
import numpy as np

from benchmarks.gpu_parts.output import Figures, digits, note
from benchmarks.gpu_parts.timing import compile_calls, copy_call
from benchmarks.gpu_parts.train import train_shape
from benchmarks.gpu_parts.worker import print_figures
from benchmarks.grouped_matmul import seconds
from benchmarks.sampler import LENGTH, decode_seconds
from composer_jax.models.cache import init_cache
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from composer_jax.models.supported_dtype import supported_network


def measure(small: bool) -> Figures:
    """Returns the figures by conversations at once."""
    config, _, _ = train_shape(small)
    config = supported_network(dataclasses.replace(config, param_dtype="bfloat16", max_context=1024))
    figures = {}
    for conversations in (4,) if small else (64, 256):
        note(f"decode, {conversations} conversations: compiling, then measuring ...")
        figures[str(conversations)] = measure_step(config, conversations, small=small)
    return figures


def measure_step(config: ModelConfig, conversations: int, *, small: bool) -> Figures:
    """Returns the time of a step and the time of reading weights and cache once.

    A step includes the host's work. The reading has the rate of a copy.
    """
    copy, num_bytes = copy_call(2**20 if small else 2**30)
    bandwidth = num_bytes / seconds(compile_calls({"copy": copy}, "copy"), rounds=5, calls=5)["copy"]
    step_s = decode_seconds(config, conversations)
    limit_s = read_bytes(config, conversations) / bandwidth
    return {
        "step_ms": digits(1000 * step_s),
        "reading_once_ms": digits(1000 * limit_s),
        "fraction_of_limit": digits(limit_s / step_s),
        "tokens_per_s": digits(conversations / step_s),
        "copy_gb_per_s": digits(bandwidth / 1e9),
    }


def read_bytes(config: ModelConfig, conversations: int) -> float:
    """Returns the bytes of the weights and of the cache entries of all contexts."""
    bytes_of = lambda tree: sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
    cache_per_token = bytes_of(jax.eval_shape(lambda: init_cache(config, 1, 64))) / 64
    return bytes_of(ModelDef(config).shapes()) + conversations * LENGTH * cache_per_token


if __name__ == "__main__":
    print_figures(measure)
