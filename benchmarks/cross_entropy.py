"""Memory and time of the cross-entropy in chunks: `python -m benchmarks.cross_entropy`.

Compares the head and the loss as a training step computes them (train/forward.py, in chunks of --chunk positions) with
optax's cross-entropy of the whole logits. Both programs return the mean over the tokens and its gradients with respect
to the hidden states and the weight of the head, float32, on one device. Runs are timed in turn.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    peak_memory_ratio    temporaries of the whole form over those in chunks, by XLA's memory analysis
    time_ratio           seconds in chunks over those of the whole form, medians
    gradient_error       largest difference of a gradient over its largest entry
    temporaries_mb, seconds    of both forms, in chunks first
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from composer_jax.models.decoder import head_logits
from composer_jax.models.predictions import Predictions
from composer_jax.ops.chunks import map_chunks
from composer_jax.parallel.platform import configure_cpu
from launch.huge_pages import restart_with_huge_pages


def chunked(hidden_TD: jax.Array, weight_DV: jax.Array, tokens_T: jax.Array, chunk: int) -> jax.Array:
    """Returns the mean loss, as predict_positions computes it."""

    def logprob(weight_DV: jax.Array, h_TD: jax.Array, token_T: jax.Array) -> jax.Array:
        return Predictions(head_logits(h_TD, weight_DV)).logprob(token_T)

    return -map_chunks(logprob, chunk, weight_DV, hidden_TD, tokens_T).mean()


def whole(hidden_TD: jax.Array, weight_DV: jax.Array, tokens_T: jax.Array) -> jax.Array:
    """Returns the mean loss from all logits at once."""
    return optax.softmax_cross_entropy_with_integer_labels(hidden_TD @ weight_DV, tokens_T).mean()


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """Returns the size of a program's temporaries, by XLA's memory analysis."""
    analysis: Any = program.memory_analysis()
    return analysis.temp_size_in_bytes


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=163_840, help="tokens of the vocabulary (default: K2's)")
    parser.add_argument("--tokens", type=int, default=4096, help="positions (default: 4096)")
    parser.add_argument("--width", type=int, default=512, help="of the hidden states (default: 512)")
    parser.add_argument("--chunk", type=int, default=456, help="positions of a chunk (default: 456, nine chunks)")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each form (default: 3)")
    o = parser.parse_args(argv)

    configure_cpu(1)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((o.tokens, o.width)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((o.width, o.vocabulary)) / o.width**0.5, jnp.float32)
    tokens = jnp.asarray(rng.integers(0, o.vocabulary, o.tokens), jnp.int32)
    forms = {
        "chunks": lambda h, w: chunked(h, w, tokens, o.chunk),
        "whole": lambda h, w: whole(h, w, tokens),
    }
    programs = {
        name: jax.jit(jax.value_and_grad(form, argnums=(0, 1))).lower(hidden, weight).compile()
        for name, form in forms.items()
    }
    temporaries = {name: temporary_bytes(program) for name, program in programs.items()}
    print(f"temporaries: {temporaries}", file=sys.stderr, flush=True)
    gradients = {name: program(hidden, weight)[1] for name, program in programs.items()}
    error = max(
        float(jnp.abs(a - b).max() / jnp.abs(b).max())
        for a, b in zip(gradients["chunks"], gradients["whole"], strict=True)
    )
    del gradients
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(o.rounds):
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(hidden, weight))
            seconds[name].append(time.perf_counter() - began)
        print(f"round {number + 1}: { ({name: round(of[-1], 2) for name, of in seconds.items()}) }", file=sys.stderr)
    median = {name: statistics.median(of) for name, of in seconds.items()}
    figures = {
        "peak_memory_ratio": round(temporaries["whole"] / temporaries["chunks"], 2),
        "time_ratio": round(median["chunks"] / median["whole"], 3),
        "gradient_error": float(f"{error:.2g}"),
        "temporaries_mb": [round(temporaries[name] / 2**20) for name in programs],
        "seconds": [round(median[name], 2) for name in programs],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
