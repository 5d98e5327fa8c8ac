"""Speed of our training step as a stage takes it, in turn with a matrix product."""

import dataclasses
import statistics
import time

import jax
import numpy as np

from benchmarks.gpu_parts.output import Figures, digits, note
from benchmarks.gpu_parts.packed_batch import packed_batch, whole_rows
from benchmarks.gpu_parts.timing import compile_calls, product_call
from composer_jax.models.attention_kinds import attention_form
from composer_jax.models.config import ModelConfig
from composer_jax.models.flops import document_lengths, training_flops
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer


def training_figures(config: ModelConfig, rows: int, length: int, *, small: bool, recompute: bool) -> Figures:
    """Returns the speed of AdamW's step on rows of packed documents, and on whole rows.

    Only the documents' tokens count, also in whole rows, which take the same steps with attention over the whole row.

    recompute: whether layers are recomputed in the backward pass.
    """
    config = dataclasses.replace(config, remat=recompute)
    rounds, steps = (2, 1) if small else (5, 4)
    mesh, batch = make_mesh(jax.devices()[:1]), packed_batch(rows, length, config.vocab_size)
    whole, optimizer = whole_rows(batch), make_optimizer(OptimizerConfig(peak=1e-4), steps=1 + 2 * rounds * steps)
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
    of_packed, of_whole, of_products = [], [], []
    for _ in range(rounds):
        for each, times in ((batch, of_packed), (whole, of_whole)):
            started = time.perf_counter()
            for _ in range(steps):
                state, pending = learner.start_step(state, [each], tokens, taken)
                taken += 1
            metrics = pending.fetch()
            times.append((time.perf_counter() - started) / steps)
        started = time.perf_counter()
        jax.block_until_ready([multiply() for _ in range(steps)])
        of_products.append((time.perf_counter() - started) / steps)
        note(f"  {tokens / of_packed[-1]:.0f} tokens/s, loss {metrics['loss']:.3f}")
    if not np.isfinite(metrics["loss"]):
        raise FloatingPointError(f"the loss is {metrics['loss']} after {taken} steps")
    step_s, rate = statistics.median(of_packed), product_flops / statistics.median(of_products)
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "tokens_per_s": digits(tokens / step_s),
        "tokens_per_s_whole_rows": digits(tokens / statistics.median(of_whole)),
        "model_tflops": digits(flops / step_s / 1e12),
        "product_tflops": digits(rate / 1e12),
        "fraction_of_product": digits(flops / step_s / rate),
        "first_step_s": digits(first_step_s),
        "peak_gb": digits(memory["peak_bytes_in_use"] / 1e9) if memory else None,
        "recomputes_layers": recompute,
        "attention_form": attention_form(config, mesh, length).form,
    }
