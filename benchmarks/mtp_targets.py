"""Which target teaches MTP modules to draft: `python -m benchmarks.mtp_targets [--seeds=0,1,2] [--rows=FILE]`.

Composer 2 (arXiv 2603.24477, section 3) trains its multi-token-prediction modules on the distribution of the main head
instead of on the token. Here a small network with experts is trained on the bytes of this package's source. Then its
MTP module is trained alone (loss.trained="mtp"), once with each target, from the same weights, with the same batches
and as many steps. The engine samples with the module's drafts and counts how many it accepts. With --rows a finished
run does not run again.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    distillation, cross_entropy    temperature -> accepted fraction of drafts by their place, mean over seeds
    difference    temperature -> [distillation minus cross_entropy in tokens accepted per draft, and its 95 % interval
                  over seeds]; null with fewer than two seeds
    seeds         that both targets were run with
"""

import argparse
import asyncio
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax
import numpy as np

from benchmarks.router_replay import PROMPT, ROWS, Weights, documents, network
from benchmarks.seeded_runs import Row, complete_rows, integers, runs_of_common_seeds
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.packing import pack_documents
from composer_jax.evals.interval import interval
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import configure_cpu
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.request import Request
from composer_jax.sampler.sampler import Sampler
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss, LanguageLossConfig
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from launch.huge_pages import restart_with_huge_pages

TARGETS: tuple[str, ...] = get_args(get_type_hints(LanguageLossConfig)["mtp_target"])
TEMPERATURES = (0.0, 1.0)
DRAFT_TOKENS = 3


def train(
    config: ModelConfig, weights: Weights, loss: LanguageLossConfig, steps: int, length: int, seed: int
) -> Weights:
    """Returns the weights after so many steps on source code."""
    optimizer = make_optimizer(OptimizerConfig(peak=3e-3, warmup=20, final=0.1), steps)
    learner = Learner(
        ModelDef(config), optimizer, LanguageLoss(loss), make_mesh(jax.devices()[:1]), router_bias_update_rate=1e-3
    )
    state, pieces = learner.init_state(*weights), documents(length, seed)
    for step in range(1, steps + 1):
        packed = [(next(pieces), np.ones(length)) for _ in range(ROWS)]
        (batch,), _ = pack_documents(packed, seq_len=length, batch_size=ROWS)
        state, metrics = learner.step(state, [dataclasses.asdict(batch)], ROWS * (length - 1))
        if step % 50 == 0:
            shown = {name: round(metrics[name] / metrics["tokens"], 3) for name in metrics if name.startswith("mtp_")}
            print(f"step {step}: {metrics['loss']:.3f} {shown or ''}", file=sys.stderr, flush=True)
    return state.params, state.router_bias


def acceptance(config: ModelConfig, weights: Weights, temperature: float, o: argparse.Namespace, seed: int) -> Row:
    """Returns how many drafts there were and how many were accepted, by their place in the draft."""
    sizes = SamplerConfig(
        slots=16,
        max_model_len=o.length,
        decode_steps=8,
        prefill_shapes=((16, PROMPT),),
        drafts="mtp",
        draft_tokens=DRAFT_TOKENS,
    )
    sampler = Sampler(ModelDef(config), make_mesh(jax.devices()[:1]), sizes, end_tokens=())
    sampler.update(*weights, version=0)
    pieces = documents(o.length, seed + 1000)  # in another order than those of the training
    prompts = [next(pieces)[:PROMPT] for _ in range(o.sampled)]

    async def main() -> None:
        async with sampler.serving():
            params = SamplingParams(o.length - PROMPT, temperature=temperature)
            requests = (Request(prompt, params, seed=number) for number, prompt in enumerate(prompts))
            await asyncio.gather(*(sampler.submit(request) for request in requests))

    asyncio.run(main())
    return {"drafted": list(sampler.stats.drafted), "accepted": list(sampler.stats.accepted)}


def measure(o: argparse.Namespace, seed: int, target: str) -> Row:
    """Returns the row of a run: seed, variant (the target), and temperature -> counts of drafts."""
    config = dataclasses.replace(network(o.layers, o.experts), n_mtp_modules=1)
    base = base_weights(config, o.steps, o.length, seed)
    print(f"seed {seed}, {target}", file=sys.stderr, flush=True)
    loss = LanguageLossConfig(mtp_weight=1.0, mtp_target=target, trained="mtp")  # pyright: ignore[reportArgumentType]
    weights = train(config, base, loss, o.mtp_steps, o.length, seed)
    counts = {f"{t:g}": acceptance(config, weights, t, o, seed) for t in TEMPERATURES}
    return {"seed": seed, "variant": target, "drafts": counts}


@functools.lru_cache(maxsize=1)
def base_weights(config: ModelConfig, steps: int, length: int, seed: int) -> Weights:
    """Returns the weights of the network whose modules have not been trained."""
    print(f"seed {seed}, base", file=sys.stderr, flush=True)
    return train(config, ModelDef(config).init(seed), LanguageLossConfig(), steps, length, seed)


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the printed object; seeds that lack a target are left out."""
    runs = runs_of_common_seeds(rows, TARGETS)
    seeds = list(runs[TARGETS[0]])
    temperatures = [f"{t:g}" for t in TEMPERATURES]
    by_place = {
        target: {t: _mean_by_place([row["drafts"][t] for row in by_seed.values()]) for t in temperatures}
        for target, by_seed in runs.items()
    }
    difference = {}
    for t in temperatures:
        per_draft = {name: [_per_draft(of[s]["drafts"][t]) for s in seeds] for name, of in runs.items()}
        differences = [a - b for a, b in zip(per_draft["distillation"], per_draft["cross_entropy"], strict=True)]
        numbers = [statistics.fmean(differences), *interval(differences)] if len(seeds) > 1 else None
        difference[t] = numbers and [round(x, 4) for x in numbers]
    return {**by_place, "difference": difference, "seeds": seeds}


def _per_draft(counts: Mapping[str, Sequence[int]]) -> float:
    """Returns how many tokens of a draft are accepted, in the mean."""
    return sum(counts["accepted"]) / max(1, counts["drafted"][0])


def _mean_by_place(runs: Sequence[Mapping[str, Sequence[int]]]) -> list[float]:
    rates = [[a / max(1, d) for a, d in zip(run["accepted"], run["drafted"], strict=True)] for run in runs]
    return [round(statistics.fmean(place), 4) for place in zip(*rates, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", type=integers, help="comma-separated integers (default: 0,1,2)")
    parser.add_argument("--rows", type=Path, help="file of the finished runs (default: none)")
    parser.add_argument("--layers", type=int, default=4, help="layers, the first without experts (default: 4)")
    parser.add_argument("--experts", type=int, default=16, help="experts of a layer (default: 16)")
    parser.add_argument("--steps", type=int, default=300, help="steps of 8 rows that train the network (default: 300)")
    parser.add_argument("--mtp_steps", type=int, default=200, help="steps that train the module (default: 200)")
    parser.add_argument("--length", type=int, default=256, help="bytes of a row (default: 256)")
    parser.add_argument("--sampled", type=int, default=64, help="rows that the engine samples (default: 64)")
    o = parser.parse_args(argv)
    configure_cpu(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = complete_rows(o.rows or Path(folder) / "rows.json", o.seeds, TARGETS, functools.partial(measure, o))
    print(json.dumps(summarize([row for row in rows if row["seed"] in o.seeds])))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
