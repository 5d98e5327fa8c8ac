"""Speed of our training step as a stage takes it: the learner's programs on packed rows, in turn with a product."""

import dataclasses
import statistics
import time

import jax
import numpy as np

from benchmarks.gpu_parts.packed_batch import packed_batch
from benchmarks.gpu_parts.timing import compile_calls, digits, note, product_call
from benchmarks.gpu_parts.worker import Figures
from composer_jax.models.attention_kinds import attention_form
from composer_jax.models.config import ModelConfig
from composer_jax.models.flops import document_lengths, training_flops
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer


def training_figures(config: ModelConfig, rows: int, length: int, *, small: bool) -> Figures:
    """Returns the speed of AdamW's step on rows of packed documents. Only their tokens count, not padding.

    Where the card has too little memory, layers are recomputed in the backward pass.
    """
    try:
        return _measure(dataclasses.replace(config, remat=False), rows, length, small=small)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    note("  too little memory for all activations: layers are recomputed in the backward pass")
    return _measure(dataclasses.replace(config, remat=True), rows, length, small=small)


def _measure(config: ModelConfig, rows: int, length: int, *, small: bool) -> Figures:
    rounds, steps = (2, 1) if small else (5, 4)
    mesh, batch = make_mesh(jax.devices()[:1]), packed_batch(rows, length, config.vocab_size)
    optimizer = make_optimizer(OptimizerConfig(peak=1e-4), steps=1 + rounds * steps)
    learner = Learner(ModelDef(config), optimizer, LanguageLoss(), mesh)
    state = learner.init_state(*learner.definition.init(0, mesh))
    tokens, flops = float(batch["weights"].sum()), training_flops(config, document_lengths(batch["segments"]))
    multiply, product_flops = product_call(256 if small else 8192)
    compile_calls({"bf16 product": multiply}, "bf16 product")
    note("  first step, compiling ...")
    started, taken = time.perf_counter(), 1
    state, metrics = learner.step(state, [batch], tokens)
    first_step_s = time.perf_counter() - started
    note(f"  first step {first_step_s:.1f} s, loss {metrics['loss']:.3f}")
    of_steps, of_products = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(steps):
            state, pending = learner.start_step(state, [batch], tokens, taken)
            taken += 1
        metrics = pending.fetch()
        of_steps.append((time.perf_counter() - started) / steps)
        started = time.perf_counter()
        jax.block_until_ready([multiply() for _ in range(steps)])
        of_products.append((time.perf_counter() - started) / steps)
        note(f"  {tokens / of_steps[-1]:.0f} tokens/s, loss {metrics['loss']:.3f}")
    if not np.isfinite(metrics["loss"]):
        raise FloatingPointError(f"the loss is {metrics['loss']} after {taken} steps")
    step_s, rate = statistics.median(of_steps), product_flops / statistics.median(of_products)
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "tokens_per_s": digits(tokens / step_s),
        "model_tflops": digits(flops / step_s / 1e12),
        "product_tflops": digits(rate / 1e12),
        "fraction_of_product": digits(flops / step_s / rate),
        "first_step_s": digits(first_step_s),
        "peak_gb": digits(memory["peak_bytes_in_use"] / 1e9) if memory else None,
        "recomputes_layers": config.remat,
        "attention_form": attention_form(config, mesh, length).form,
    }
