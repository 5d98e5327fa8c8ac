"""Decoding speed with and without sampling parameters: `python -m benchmarks.sampling_parameters [--slots=8]`.

The network has the widths and the vocabulary of SmolLM2-135M, in float32 with random weights. All slots decode at once,
one kind of request after the other and in rounds, so that other work on the machine slows all kinds. Prints progress on
stderr and, as the last line of stdout, one JSON object:
    plain_tokens_per_s    temperature 1, top_p 1, top_k 0: the program of RL
    greedy, temperature, top_k, top_p, all    time of such requests relative to plain, e.g. 1.05 is 5 % more; the median
                                              of the rounds
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence

import jax

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.models.model_def import ModelDef
from composer_jax.models.presets import PRESETS
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import configure_cpu
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sampler import Sampler
from launch.huge_pages import restart_with_huge_pages

KINDS = {
    "plain": {},
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
}


def make_sampler(layers: int, slots: int, tokens: int) -> Sampler:
    """A sampler with random weights that never stops before `tokens`."""
    config = dataclasses.replace(
        PRESETS["smollm2_135m"], n_layers=layers, param_dtype="float32", compute_dtype="float32"
    )
    definition = ModelDef(config)
    mesh = make_mesh(jax.devices()[:1])
    sizes = SamplerConfig(slots=slots, max_model_len=tokens + 32, prefill_shapes=((slots, 16),))
    sampler = Sampler(definition, mesh, sizes, end_tokens=())
    sampler.update(*definition.init(0, mesh), version=0, copy=False)
    return sampler


async def seconds_to_decode(sampler: Sampler, params: SamplingParams) -> float:
    """Seconds in which every slot samples a message of params.max_tokens."""
    sessions = [await sampler.open(seed) for seed in range(sampler.config.slots)]
    started = time.perf_counter()
    await asyncio.gather(*(session.sample([1, 2, 3], params) for session in sessions))
    seconds = time.perf_counter() - started
    for session in sessions:
        session.close()
    return seconds


async def measure(sampler: Sampler, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of every round by kind of request; the round that compiles is left out."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    async with sampler.serving():
        for number in range(rounds + 1):
            for kind, fields in KINDS.items():
                took = await seconds_to_decode(sampler, SamplingParams(tokens, **fields))
                if number:
                    seconds[kind].append(took)
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="layers of the network (default: 4; SmolLM2 has 30)")
    parser.add_argument("--slots", type=int, default=8, help="conversations (default: 8)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each (default: 64)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are timed (default: 7)")
    o = parser.parse_args(argv)
    configure_cpu(1)
    seconds = asyncio.run(measure(make_sampler(o.layers, o.slots, o.tokens), o.tokens, o.rounds))
    figures = {"plain_tokens_per_s": round(o.slots * o.tokens / statistics.median(seconds["plain"]), 1)}
    for kind in KINDS:
        if kind != "plain":
            ratios = [took / plain for took, plain in zip(seconds[kind], seconds["plain"], strict=True)]
            figures[kind] = round(statistics.median(ratios), 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
