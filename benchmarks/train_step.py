"""The speed of a training step as a fraction of that of matrix products: `python -m benchmarks.train_step [--batch=8]`.

The network has 4 layers, width 512 and 16 experts, 4 per token; --width scales every matrix. It computes in --dtype,
its weights are float32. A step is loss, gradients and AdamW. Steps and products of square matrices of --dtype alternate
in one process. Prints progress on stderr and, as the last line of stdout, one JSON object:
    fraction_of_matmul_rate    model FLOPs per second (models/flops.py, three forward passes) over those of the product
    tokens_per_s
    matmul_gflops              GFLOP/s of the product
    parameters                 of the network
    kernel_fraction            share of the steps' processor time that the operating system took
With --before it prints {"vs_before"} instead: tokens_per_s over those of an older commit, the median of --rounds, each
of which measures both, in a process each.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.older_commit import median_ratio, unpack
from composer_jax.models.config import ModelConfig
from composer_jax.models.flops import forward_flops
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import configure_cpu
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from launch.huge_pages import restart_with_huge_pages


def network(width: int, dtype: str) -> ModelConfig:
    """Returns the network, whose matrices are proportional to `width` and which computes in `dtype`."""
    return ModelConfig(
        vocab_size=8192,
        d_model=width,
        n_layers=4,
        n_dense_layers=1,
        n_heads=width // 64,
        kv_lora_rank=width // 2,
        q_lora_rank=None,
        qk_nope_dim=64,
        qk_rope_dim=32,
        v_head_dim=64,
        dense_ff_dim=4 * width,
        expert_ff_dim=width,
        n_experts=16,
        experts_per_token=4,
        n_shared_experts=1,
        compute_dtype=dtype,
        dispatch="ring",
        remat=False,
        scan_unroll=4,
    )


PRODUCTS = 4
"""Products of one timing, all in flight."""


def matmul_flops_per_s(a: jax.Array) -> float:
    """Measured FLOP/s of products of `a`, [n, n], with itself."""
    started = time.perf_counter()
    jax.block_until_ready([_multiply(a) for _ in range(PRODUCTS)])
    return PRODUCTS * 2 * a.shape[0] ** 3 / (time.perf_counter() - started)


def _cpu_seconds() -> np.ndarray:
    """Processor time of this process so far, [in the program, in the operating system]."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return np.array([usage.ru_utime, usage.ru_stime])


_multiply = jax.jit(lambda a: a @ a)


def compare(before: str, rounds: int, options: Sequence[str]) -> dict[str, float]:
    """Returns vs_before: `rounds` measurements of the working tree and of an older commit, in turn."""
    ours, older = [], []
    with tempfile.TemporaryDirectory() as folder:
        checkout = unpack(before, Path(folder))
        for _ in range(rounds):
            ours.append(_measure_in_process(Path(__file__).parents[1], options))
            older.append(_measure_in_process(checkout, options))
            rates = [figures[-1]["tokens_per_s"] for figures in (ours, older)]
            print(f"tokens/s: {rates[0]}, of {before}: {rates[1]}", file=sys.stderr, flush=True)
    return {"vs_before": median_ratio(ours, older)}


def _measure_in_process(checkout: Path, options: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.train_step", *options]
    done = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step (default: 8)")
    parser.add_argument("--accumulate", type=int, default=1, help="batches that the rows are split into (default: 1)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row (default: 512)")
    parser.add_argument("--width", type=int, default=512, help="of the network, a multiple of 64 (default: 512)")
    parser.add_argument("--dtype", default="float32", help="of the computation (default: float32)")
    parser.add_argument("--product", type=int, default=2048, help="rows of the products' matrices (default: 2048)")
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed (default: 8)")
    parser.add_argument("--before", default="", help="an older commit to compare with")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each with --before (default: 9)")
    o = parser.parse_args(argv)

    if o.before:
        names = ("batch", "accumulate", "length", "width", "dtype", "product", "steps")
        return print(json.dumps(compare(o.before, o.rounds, [f"--{name}={getattr(o, name)}" for name in names])))
    if o.width < 64 or o.width % 64:
        parser.error(f"--width={o.width} does not split into heads of 64; use a multiple of 64")
    config = network(o.width, o.dtype)
    configure_cpu(1)
    mesh = make_mesh(jax.devices()[:1])
    learner = Learner(ModelDef(config), make_optimizer(OptimizerConfig(peak=1e-3), steps=1000), LanguageLoss(), mesh)
    state = learner.init_state(*learner.definition.init(0, mesh))
    rng = np.random.default_rng(0)
    if o.batch % o.accumulate:
        parser.error(f"--batch={o.batch} rows do not split into --accumulate={o.accumulate} equal batches")
    shape = (o.batch // o.accumulate, o.length)
    batch = {
        "tokens": rng.integers(0, config.vocab_size, shape).astype(np.int32),
        "positions": np.broadcast_to(np.arange(o.length, dtype=np.int32), shape),
        "segments": np.ones(shape, np.int32),
        "weights": np.ones(shape, np.float32),
    }
    a = jnp.asarray(rng.standard_normal((o.product, o.product)), o.dtype)
    jax.block_until_ready(_multiply(a))
    work = 3 * o.batch * forward_flops(config, o.length)
    rates, products, cpu = [], [], np.zeros(2)
    for step in range(o.steps + 1):
        products.append(matmul_flops_per_s(a))
        started, before = time.perf_counter(), _cpu_seconds()
        state, metrics = learner.step(state, [batch] * o.accumulate, float(o.batch * o.length))
        rates.append(work / (time.perf_counter() - started))
        cpu += (_cpu_seconds() - before) * (step > 0)
        note = "compiled" if step == 0 else f"{rates[-1] / products[-1]:.0%} of {products[-1] / 1e9:.0f} GFLOP/s"
        print(f"step {step}: loss {metrics['loss']:.3f}, {note}", file=sys.stderr, flush=True)
    rate, product = statistics.median(rates[1:]), statistics.median(products[1:])
    figures = {
        "fraction_of_matmul_rate": round(rate / product, 3),
        "tokens_per_s": round(rate / work * o.batch * o.length, 1),
        "matmul_gflops": round(product / 1e9, 1),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "kernel_fraction": round(cpu[1] / cpu.sum(), 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
