"""Groups of conversations of several turns through the sampler: `python benchmarks/conversations.py --model=demo`.

Every conversation has the prompt of its group; after each message it gets an observation of 50 to 200 tokens. Weights
are random, and messages have fixed lengths. Prints, as the last line of stdout, one JSON object:
    tokens_per_s      sampled tokens over the seconds of all conversations at once
    naive_tokens_per_s    the same of a loop: one conversation after the other, the whole context prefilled each turn
    prefilled_tokens  of all conversations at once
    prefill_places    rows x tokens of the calls that prefilled them, padding included
    context_tokens    that the contexts have beside what was sampled
    compilations      during the conversations, after the warm-up
    cache_overhead    room in the pages that conversations hold, over their tokens; the mean over time

The file runs against an older checkout, too, whose sessions take what is new in a context instead of the context:
PYTHONPATH=CHECKOUT python benchmarks/conversations.py. Figures that the older engine does not have are left out.
"""

import argparse
import asyncio
import dataclasses
import inspect
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from composer_jax.models.presets import PRESETS
from composer_jax.observe.compilations import count_compilations
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import configure_cpu
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sampler import Sampler
from composer_jax.schema.run_config import run_config
from configs import tiny

WIDE = ModelConfig(
    vocab_size=8192,
    d_model=512,
    n_layers=4,
    n_dense_layers=1,
    n_heads=8,
    kv_lora_rank=256,
    q_lora_rank=None,
    qk_nope_dim=64,
    qk_rope_dim=32,
    v_head_dim=64,
    dense_ff_dim=2048,
    expert_ff_dim=512,
    n_experts=16,
    experts_per_token=4,
    n_shared_experts=1,
    compute_dtype="float32",
    dispatch="ring",
)
CAPACITY = 1536


@dataclasses.dataclass(frozen=True)
class Talk:
    """One conversation."""

    prompt: list[int]
    observations: list[list[int]]
    """Before each message but the first."""
    lengths: list[int]
    """Tokens of each message."""


def make_talks(prompts: int, samples: int, turns: int, vocab_size: int, seed: int = 0) -> list[Talk]:
    """Returns `samples` conversations of each prompt, those of a prompt one after the other."""
    rng = np.random.default_rng(seed)
    tokens = lambda low, high: rng.integers(1, vocab_size, rng.integers(low, high + 1)).tolist()  # noqa: E731
    talks = []
    for _ in range(prompts):
        prompt = tokens(100, 300)
        for _ in range(samples):
            observations = [tokens(50, 200) for _ in range(turns - 1)]
            talks.append(Talk(prompt, observations, rng.integers(16, 65, turns).tolist()))
    return talks


def model_config(name: str, dtype: str = "float32") -> ModelConfig:
    """Returns the network of --model. dtype: of what is computed; weights are stored in float32."""
    if name == "demo":
        model = dataclasses.replace(run_config(tiny.get_config().to_dict()).model, max_context=CAPACITY)
    elif name == "smollm2":
        model = dataclasses.replace(PRESETS["smollm2_135m"], param_dtype="float32")
    else:
        model = WIDE
    return dataclasses.replace(model, compute_dtype=dtype)


def make_sampler(model: ModelConfig, slots: int, checkpoint: str = "") -> Sampler:
    """Returns a sampler whose messages end at their budgets, with the weights of a checkpoint or random ones."""
    mesh = make_mesh(jax.devices()[:1])
    if checkpoint:
        definition, *weights = open_checkpoint(checkpoint).load(mesh, "float32", mtp=False)
    else:
        definition = ModelDef(model)
        weights = definition.init(0, mesh)
    sizes: dict[str, Any] = dict(slots=slots, max_model_len=CAPACITY, decode_steps=8)
    if "windows" in {
        field.name for field in dataclasses.fields(SamplerConfig)
    }:  # older: what a call reads of a context
        sizes["windows"] = (256, 512, 1024)
    config = SamplerConfig(**sizes)
    sampler = Sampler(definition, mesh, config, end_tokens=())
    params, router_bias = weights
    sampler.update(params, router_bias, version=0, copy=False)
    sampler.warm_up()
    return sampler


async def converse(sampler: Sampler, talk: Talk, seed: int) -> None:
    """One conversation in a session of its own."""
    session = await sampler.open(seed)
    whole_context = "context" in inspect.signature(session.sample).parameters
    context, delta = list(talk.prompt), list(talk.prompt)
    for observation, length in zip([*talk.observations, []], talk.lengths, strict=True):
        sample = await session.sample(context if whole_context else delta, SamplingParams(length))
        assert len(sample.tokens) == length
        context, delta = [*context, *sample.tokens, *observation], observation
    session.close()


def run_together(sampler: Sampler, talks: Sequence[Talk]) -> dict[str, Any]:
    """Plays all conversations at once; returns the figures."""
    overheads: list[float] = []

    async def watch() -> None:
        while True:
            if stats := getattr(sampler, "stats", None):
                if stats.live_tokens:
                    overheads.append(stats.held_pages * sampler.limits.page_size / stats.live_tokens)
            await asyncio.sleep(0.02)

    async def main() -> None:
        async with sampler.serving():
            watcher = asyncio.create_task(watch())
            await asyncio.gather(*(converse(sampler, talk, seed) for seed, talk in enumerate(talks)))
            watcher.cancel()

    before, started = count_compilations(), time.perf_counter()
    prefilled, places = sampler.prefilled_tokens, getattr(sampler, "prefill_places", 0)
    asyncio.run(main())
    seconds = time.perf_counter() - started
    figures = {
        "tokens_per_s": sum(sum(talk.lengths) for talk in talks) / seconds,
        "prefilled_tokens": sampler.prefilled_tokens - prefilled,
        "context_tokens": sum(len(talk.prompt) + sum(map(len, talk.observations)) for talk in talks),
        "compilations": count_compilations() - before,
    }
    if hasattr(sampler, "prefill_places"):
        figures["prefill_places"] = sampler.prefill_places - places
    return figures | ({"cache_overhead": float(np.mean(overheads))} if overheads else {})


def run_naively(sampler: Sampler, talks: Sequence[Talk]) -> float:
    """Plays one conversation after the other and caches nothing between turns; returns tokens per second."""

    async def main() -> None:
        async with sampler.serving():
            for talk in talks:
                context = list(talk.prompt)
                for observation, length in zip([*talk.observations, []], talk.lengths, strict=True):
                    session = await sampler.open(0)
                    sample = await session.sample(context, SamplingParams(length))
                    session.close()
                    sampler.reset_prefix_cache()
                    context += [*sample.tokens, *observation]

    started = time.perf_counter()
    asyncio.run(main())
    return sum(sum(talk.lengths) for talk in talks) / (time.perf_counter() - started)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "wide", "smollm2"), default="demo", help="network (default: demo)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of what is computed")
    parser.add_argument("--prompts", type=int, default=8, help="groups (default: 8)")
    parser.add_argument("--samples", type=int, default=8, help="conversations of each (default: 8)")
    parser.add_argument("--turns", type=int, default=4, help="messages of a conversation (default: 4)")
    parser.add_argument("--checkpoint", default="", help="weights of the network (default: random ones)")
    parser.add_argument("--naive", type=int, default=0, help="conversations of the naive loop (default: none)")
    o = parser.parse_args(argv)

    configure_cpu(1)
    model = model_config(o.model, o.dtype)
    talks = make_talks(o.prompts, o.samples, o.turns, model.vocab_size)
    sampler = make_sampler(model, len(talks), o.checkpoint)
    run_together(sampler, talks[: o.samples])  # compiles what the warm-up left, and fills the processor's caches
    figures = run_together(sampler, talks)
    print(figures, file=sys.stderr)
    if o.naive:
        alone = make_sampler(model, 1, o.checkpoint)
        figures["naive_tokens_per_s"] = run_naively(alone, talks[:: max(1, len(talks) // o.naive)])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
