"""Speed of the grouped matrix product: `python -m benchmarks.grouped_matmul [--rows=4096] [--groups=16] ...`.

Times ours, `jax.lax.ragged_dot` and one batched product of the same arithmetic (equal groups) in turns and in one
process, so that a noisy machine slows all three. Prints progress on stderr and, as the last line of stdout, one JSON
object:
    vs_ragged_dot_forward, vs_ragged_dot_backward    times faster than ragged_dot (backward: both gradients)
    vs_batched                                       times the seconds of the batched product, forward plus backward
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.ops.grouped_matmul import grouped_matmul
from launch.huge_pages import restart_with_huge_pages


def seconds(functions: Mapping[str, Callable], rounds: int, calls: int) -> dict[str, float]:
    """Median seconds of a call of each function, in turns; the first round, which compiles, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for index in range(rounds + 1):
        for name, function in functions.items():
            started = time.perf_counter()
            jax.block_until_ready([function() for _ in range(calls)])
            if index:
                times[name].append((time.perf_counter() - started) / calls)
    return {name: statistics.median(samples) for name, samples in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, meaning in (
        ("rows", 4096, "T"),
        ("groups", 16, "E"),
        ("depth", 256, "D: width of a row"),
        ("width", 256, "F: width of a product"),
        ("rounds", 15, "of timing"),
        ("calls", 1, "of one timing, all in flight; 20 hide what a GPU takes to start a program"),
        ("seed", 0, "of the rows and of the random, so unequal, groups"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: float32)")
    o = parser.parse_args(argv)
    if o.rows % o.groups:
        parser.error(f"--groups={o.groups} must divide --rows={o.rows}: the batched product has equal groups")

    rng = np.random.default_rng(o.seed)
    x, dy = (jnp.asarray(rng.standard_normal((o.rows, n)), o.dtype) for n in (o.depth, o.width))
    w = jnp.asarray(rng.standard_normal((o.groups, o.depth, o.width)), o.dtype)
    sizes = jnp.asarray(np.bincount(rng.integers(0, o.groups, o.rows), minlength=o.groups), jnp.int32)

    def batched(x, w, sizes):
        return jnp.einsum("etd,edf->etf", x.reshape(o.groups, -1, o.depth), w).reshape(o.rows, o.width)

    def gradients(product):
        return jax.jit(lambda x, w, sizes, dy: jax.vjp(lambda x, w: product(x, w, sizes), x, w)[1](dy))

    products = {"ours": grouped_matmul, "ragged_dot": jax.lax.ragged_dot, "batched": batched}
    forward = {name: partial(jax.jit(product), x, w, sizes) for name, product in products.items()}
    backward = {name: partial(gradients(product), x, w, sizes, dy) for name, product in products.items()}
    medians: list[dict[str, float]] = []
    for name, functions in (("forward", forward), ("backward", backward)):
        medians.append(seconds(functions, o.rounds, o.calls))
        line = ", ".join(f"{key} {1000 * value:.2f} ms" for key, value in medians[-1].items())
        print(f"{name}: {line}", file=sys.stderr, flush=True)
    forward_s, backward_s = medians
    figures = {
        "vs_ragged_dot_forward": forward_s["ragged_dot"] / forward_s["ours"],
        "vs_ragged_dot_backward": backward_s["ragged_dot"] / backward_s["ours"],
        "vs_batched": (forward_s["ours"] + backward_s["ours"]) / (forward_s["batched"] + backward_s["batched"]),
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
