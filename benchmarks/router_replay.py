"""What router replay does to the mismatch of sampler and learner: `python -m benchmarks.router_replay [--seeds=0,1,2]`.

A small network with experts is trained in float32 on the bytes of this package's source, so that its predictions and
its routers are not random. An engine in bfloat16, and one with 8-bit weights besides, samples from it at temperature
1 and records its routes. A float32 learner with the same weights then scores the same tokens: with its own routes
("without"), with those of the engine ("replay"), and with those that are plausible to it ("filtered" with the default
of rl.loss.replay_plausibility, "strict" with 0.9). The engine "stale" has the weights of --stale steps before, as in
asynchronous RL; its gaps are also the learner's progress.

A seed decides the weights at the start, and the order of the text; with --rows a finished seed does not run again.

Prints progress on stderr and, as the last line of stdout, one JSON object of means over the seeds:
    p99_without, p99_replay, p99_filtered, p99_strict    99th percentile of |log p_learner - log p_engine| with the
                bfloat16 engine
    cost        how many times as long a gradient and the sampling of the rows take with replay (medians, in turn)
    engines     by engine and way of scoring: the figures of composer_jax/stages/replay_score.py; foreign and filtered,
                fractions of the engine's choices of experts that the learner would not have made, and that the filter
                replaced
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import composer_jax
from benchmarks.seeded_runs import complete_rows, integers
from composer_jax.agent.transcript import Transcript, TranscriptRow
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.packing import pack_documents
from composer_jax.models.config import ModelConfig
from composer_jax.models.decoder import Decoder
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.models.router_replay import RouterReplay
from composer_jax.parallel import context
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import configure_cpu
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sampler import Sampler
from composer_jax.seeds import hash_seed
from composer_jax.stages.replay_score import gap_figures
from composer_jax.train.forward import predict_positions
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss, PolicyLossConfig
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from launch.huge_pages import restart_with_huge_pages

BFLOAT16 = "bfloat16"
ENGINES = {
    BFLOAT16: "bfloat16",
    "float8_weights": "float8_e4m3fn",
    "int8_weights": "int8",
    "stale": "bfloat16",
}
"""Name -> sampler.param_dtype; all of them compute in bfloat16."""
WAYS = {"without": None, "replay": 0.0, "filtered": PolicyLossConfig().replay_plausibility, "strict": 0.9}
"""Name -> plausibility of the replay."""
PROMPT, ROWS = 32, 8
SIZES = ("layers", "experts", "steps", "length", "sampled", "stale")
"""Flags that make up the variant of a row: those of other sizes are not mixed."""


def network(layers: int, experts: int) -> ModelConfig:
    """A network of MLA and experts over bytes."""
    return ModelConfig(
        vocab_size=256,
        d_model=128,
        n_layers=layers,
        n_dense_layers=1,
        n_heads=4,
        kv_lora_rank=64,
        qk_nope_dim=16,
        qk_rope_dim=16,
        v_head_dim=32,
        dense_ff_dim=256,
        expert_ff_dim=32,
        n_experts=experts,
        experts_per_token=4,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        max_context=512,
        dispatch="ring",
        compute_dtype="float32",
    )


def documents(length: int, seed: int) -> Iterator[list[int]]:
    """Yields pieces of the package's source files, as bytes, in a random order."""
    folder = Path(next(iter(composer_jax.__path__)))
    text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    pieces = [text[i : i + length] for i in range(0, len(text) - length, length)]
    rng = np.random.default_rng(seed)
    while True:
        for i in rng.permutation(len(pieces)):
            yield list(pieces[i])


Weights = tuple[Params, Params]
"""(params, router_bias)."""


def train(config: ModelConfig, steps: int, stale: int, length: int, seed: int) -> tuple[Weights, Weights]:
    """Returns the weights after pretraining on source code, and those of `stale` steps before."""
    optimizer = make_optimizer(OptimizerConfig(peak=3e-3, warmup=20, final=0.1), steps)
    learner = Learner(
        ModelDef(config), optimizer, LanguageLoss(), make_mesh(jax.devices()[:1]), router_bias_update_rate=1e-3
    )
    state, pieces = learner.init_state(*learner.definition.init(seed)), documents(length, seed)
    old = None
    for step in range(steps):
        if step == steps - stale:
            old = jax.tree.map(jnp.copy, (state.params, state.router_bias))
        packed = [(next(pieces), np.ones(length)) for _ in range(ROWS)]
        (batch,), _ = pack_documents(packed, seq_len=length, batch_size=ROWS)
        state, metrics = learner.step(state, [dataclasses.asdict(batch)], ROWS * (length - 1))
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: {metrics['loss']:.3f} nats per byte", file=sys.stderr, flush=True)
    assert old is not None
    return (state.params, state.router_bias), old


def make_sampler(config: ModelConfig, weights: Weights, dtype: str, length: int, cache_routing: bool = True) -> Sampler:
    """Returns an engine with these weights whose programs are compiled."""
    definition = ModelDef(dataclasses.replace(config, compute_dtype="bfloat16", cache_routing=cache_routing))
    sizes = SamplerConfig(
        slots=16, max_model_len=length, decode_steps=16, prefill_shapes=((16, PROMPT),), param_dtype=dtype
    )
    sampler = Sampler(definition, make_mesh(jax.devices()[:1]), sizes, end_tokens=())
    sampler.update(*weights, version=0)
    sampler.warm_up()
    return sampler


def sample_rows(sampler: Sampler, n: int, length: int, seed: int) -> list[TranscriptRow]:
    """Returns n rows that an engine sampled, with its log-probabilities and, if it caches them, routes."""
    pieces = documents(length, seed)
    params = SamplingParams(length - PROMPT, return_routing=sampler.definition.config.cache_routing)

    async def play(number: int, prompt: list[int]) -> TranscriptRow:
        session, transcript = await sampler.open(hash_seed("row", seed, number)), Transcript()
        sample = await session.sample(prompt, params)
        session.close()
        transcript.append("prompt", prompt)
        transcript.append("assistant", (), sample.tokens, sample.logprobs, sample.versions, routes=sample.routing)
        return transcript.rows()[0]

    async def main() -> list[TranscriptRow]:
        async with sampler.serving():
            return await asyncio.gather(*(play(number, next(pieces)[:PROMPT]) for number in range(n)))

    return asyncio.run(main())


def logprobs(decoder: Decoder, tokens_BS: jax.Array, replay: RouterReplay | None):
    """Returns float32 [B,S], the log-probability of each token, and the statistics of the routers."""
    positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
    hidden = decoder(tokens_BS, positions_BS, jnp.ones_like(tokens_BS), replay)
    next_BS = context.shift_left(tokens_BS)
    at_position = lambda main, token: main.logprob(token)  # noqa: E731
    out_BS = predict_positions(decoder, at_position, None, (hidden.last_BSD,), next_BS)
    return context.shift_right(out_BS), hidden.router_stats


def batches(rows: Sequence[TranscriptRow]) -> Iterator[tuple[Sequence[TranscriptRow], np.ndarray, np.ndarray]]:
    """Yields ROWS rows at a time, with their tokens [B,S] and routes [B,S,L,k]."""
    for i in range(0, len(rows), ROWS):
        part = rows[i : i + ROWS]
        routes = np.stack([row.routes for row in part if row.routes is not None])
        yield part, np.stack([row.tokens for row in part]), routes


def score_rows(
    config: ModelConfig, weights: Weights, rows: list[TranscriptRow], plausibility: float | None
) -> dict[str, float]:
    """Returns the figures of one way of scoring; plausibility None leaves the learner its own routes."""

    @jax.jit
    def score(tokens_BS, routes_BSLk):
        replay = None if plausibility is None else RouterReplay(routes_BSLk, plausibility)
        return logprobs(ModelDef(config).bind(*weights), tokens_BS, replay)

    gaps, counts = [], np.zeros(3)
    for part, tokens, routes in batches(rows):
        logprobs_BS, stats = score(tokens, routes)
        gaps += [(np.asarray(p) - row.logprobs)[row.trained] for p, row in zip(logprobs_BS, part, strict=True)]
        if stats.replay is not None:
            counts += [float(x.sum()) for x in stats.replay]
    figures = gap_figures(np.concatenate(gaps))
    if plausibility is not None:
        replayed = {"foreign": counts[1] / counts[0], "filtered": counts[2] / counts[0]}
        figures |= {name: float(f"{value:.4g}") for name, value in replayed.items()}
    return figures


def measure_cost(
    config: ModelConfig, weights: Weights, rows: list[TranscriptRow], length: int, seed: int
) -> dict[str, float]:
    """Returns how many times as long the learner's gradient and the engine's sampling take with replay, in turn."""

    @partial(jax.jit, static_argnames="replays")
    def gradient(params, tokens_BS, routes_BSLk, replays):
        def loss(params):
            replay = RouterReplay(routes_BSLk, PolicyLossConfig().replay_plausibility) if replays else None
            return logprobs(ModelDef(config).bind(params, weights[1]), tokens_BS, replay)[0].mean()

        return jax.grad(loss)(params)

    _, tokens, routes = next(batches(rows))
    learners = {how: partial(gradient, weights[0], tokens, routes, how) for how in (False, True)}
    samplers = {how: make_sampler(config, weights, "bfloat16", length, cache_routing=how) for how in (False, True)}
    engines = {how: partial(sample_rows, sampler, len(rows), length, seed) for how, sampler in samplers.items()}
    return {"gradient": _ratio(learners, rounds=11), "sampling": _ratio(engines, rounds=5)}


def _ratio(calls: Mapping[bool, Callable[[], Any]], rounds: int) -> float:
    """Returns the median seconds of calls[True] over those of calls[False], which run in turn after a first round."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds + 1):
        for how, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            seconds[how].append(time.perf_counter() - began)
    return float(f"{np.median(seconds[True][1:]) / np.median(seconds[False][1:]):.3g}")


def measure(config: ModelConfig, o: argparse.Namespace, seed: int, variant: str) -> dict[str, Any]:
    """Returns the row of a seed: seed, variant, cost, and engine -> way of scoring -> its figures."""
    weights, old = train(config, o.steps, o.stale, o.length, seed)
    engines, rows = {}, []
    for name, dtype in ENGINES.items():
        sampler = make_sampler(config, old if name == "stale" else weights, dtype, o.length)
        rows = sample_rows(sampler, o.sampled, o.length, seed)
        engines[name] = {way: score_rows(config, weights, rows, how) for way, how in WAYS.items()}
        print(name, json.dumps(engines[name], indent=1), file=sys.stderr, flush=True)
    cost = measure_cost(config, weights, rows, o.length, seed)
    return {"seed": seed, "variant": variant, "cost": cost, "engines": engines}


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the printed object of rows of one variant."""
    engines = _mean([row["engines"] for row in rows])
    p99 = {f"p99_{way}": engines[BFLOAT16][way]["p99"] for way in WAYS}
    return {**p99, "cost": _mean([row["cost"] for row in rows]), "engines": engines, "seeds": [r["seed"] for r in rows]}


def _mean(trees: Sequence[Any]) -> Any:
    """Returns the mean of nested dicts of numbers, leaf by leaf, with four significant digits."""
    if isinstance(trees[0], Mapping):
        return {name: _mean([tree[name] for tree in trees]) for name in trees[0]}
    return float(f"{statistics.fmean(trees):.4g}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0", type=integers, help="comma-separated integers (default: 0)")
    parser.add_argument("--rows", type=Path, help="file of the finished seeds (default: none)")
    parser.add_argument("--layers", type=int, default=8, help="layers, the first without experts (default: 8)")
    parser.add_argument("--experts", type=int, default=64, help="experts of a layer (default: 64)")
    parser.add_argument("--steps", type=int, default=300, help="training steps of 8 rows (default: 300)")
    parser.add_argument("--length", type=int, default=256, help="bytes of a row (default: 256)")
    parser.add_argument("--sampled", type=int, default=64, help="rows that an engine samples, of 8 (default: 64)")
    parser.add_argument("--stale", type=int, default=5, help="steps before the last (default: 5)")
    o = parser.parse_args(argv)
    if not 1 <= o.stale <= o.steps:
        parser.error(f"--stale={o.stale} is not between 1 and --steps={o.steps}")
    configure_cpu(1)
    config = network(o.layers, o.experts)
    variant = ", ".join(f"{name} {getattr(o, name)}" for name in SIZES)
    with tempfile.TemporaryDirectory() as folder:
        file = o.rows or Path(folder) / "rows.json"
        rows = complete_rows(file, o.seeds, (variant,), lambda *run: measure(config, o, *run))
    print(json.dumps(summarize([row for row in rows if row["variant"] == variant and row["seed"] in o.seeds])))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
