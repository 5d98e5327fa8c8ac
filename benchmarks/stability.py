"""What the balance loss and QK-clip do to a tiny network: `python -m benchmarks.stability [--seeds=0,1] [--steps=300]`.

Two layers of latent attention and 16 experts learn rows of a Markov chain whose second half repeats the first. Variants
of BALANCE have the sequence-wise balance loss (loss.balance_weight) and no selection bias of the router; those of
CLIP are trained by Muon at a high learning rate with QK-clip (optimizer.qk_clip). Runs of one seed begin with the same
weights and read the same rows. A finished run is a row of --rows and does not run again.

Prints progress on stderr and, as the last line of stdout, one JSON object, VARIANT ->
    loss         nats per token of held-out rows, after the last step
    imbalance    tokens of the busiest expert over the mean, in the last tenth of the steps
    max_logit    the largest attention logit in the last tenth of the steps; null where it is not measured
each a list with a number per seed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.seeded_runs import Row, complete_rows, integers

VOCABULARY, LENGTH, ROWS = 64, 64, 16
NETWORK: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    d_model=64,
    n_layers=2,
    n_dense_layers=0,
    n_heads=4,
    kv_lora_rank=16,
    qk_nope_dim=16,
    qk_rope_dim=8,
    v_head_dim=16,
    expert_ff_dim=32,
    n_experts=16,
    experts_per_token=2,
    max_context=LENGTH,
    compute_dtype="float32",
    dispatch="dense",
)
BALANCE = {f"balance {weight:g}": weight for weight in (0.0, 1e-4, 1e-2, 1e-1)}
"""Variant -> loss.balance_weight."""
CLIP = {"muon, no clip": 1e9, "muon, clip at 100": 100.0, "muon, clip at 20": 20.0}
"""Variant -> optimizer.qk_clip; no logit reaches the first, which only measures them."""
RATES = {"adamw": 3e-3, "muon": 0.1}


def rows(seed: int, index: int) -> dict[str, np.ndarray]:
    """Returns batch number `index`; the chain is the seed's."""
    table = np.random.default_rng([seed, 0]).dirichlet(np.full(VOCABULARY, 0.1), VOCABULARY).cumsum(-1)
    draws = np.random.default_rng([seed, 1, index]).random((ROWS, LENGTH // 2))
    state, tokens = np.zeros(ROWS, np.int64), np.zeros((ROWS, LENGTH // 2), np.int64)
    for place in range(LENGTH // 2):
        state = np.minimum((table[state] < draws[:, place, None]).sum(-1), VOCABULARY - 1)
        tokens[:, place] = state
    tokens = np.concatenate([tokens, tokens], axis=1).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    weights = (positions > 0).astype(np.float32)
    return {"tokens": tokens, "positions": positions, "segments": np.ones_like(tokens), "weights": weights}


def measure(steps: int, seed: int, variant: str) -> Row:
    """Returns the row of a run: seed, variant, steps, loss, imbalance, max_logit."""
    import jax

    from composer_jax.models.config import ModelConfig
    from composer_jax.models.model_def import ModelDef
    from composer_jax.parallel.mesh import make_mesh
    from composer_jax.train.learner import Learner
    from composer_jax.train.losses import LanguageLoss, LanguageLossConfig
    from composer_jax.train.optimizer import OptimizerConfig, make_optimizer

    name = "muon" if variant in CLIP else "adamw"
    optimizer = OptimizerConfig(name=name, peak=RATES[name], warmup=20, final=0.3, qk_clip=CLIP.get(variant))
    loss = LanguageLoss(LanguageLossConfig(balance_weight=BALANCE.get(variant, 0.0)))
    definition, mesh = ModelDef(ModelConfig(**NETWORK)), make_mesh(jax.devices()[:1])
    learner = Learner(definition, make_optimizer(optimizer, steps), loss, mesh)
    state, metrics = learner.init_state(*definition.init(seed)), []
    for index in range(steps):
        batch = rows(seed, index)
        state, step = learner.step(state, [batch], float(batch["weights"].sum()))
        metrics.append(step)
    last = metrics[-max(1, steps // 10) :]
    sums = learner.evaluate(state, [rows(seed, steps + index) for index in range(8)])
    logits = [step["max_attention_logit"] for step in last if "max_attention_logit" in step]
    row = {
        "seed": seed,
        "variant": variant,
        "steps": steps,
        "loss": round(float(sums["nll"] / sums["tokens"]), 4),
        "imbalance": round(statistics.fmean(step["load_imbalance"] for step in last), 3),
        "max_logit": round(max(logits), 1) if logits else None,
    }
    print(row, file=sys.stderr, flush=True)
    return row


def summarize(rows: Sequence[Row], seeds: Sequence[int]) -> dict[str, Any]:
    """Returns the printed object."""
    runs = {(row["variant"], row["seed"]): row for row in rows}
    return {
        variant: {name: [runs[variant, seed][name] for seed in seeds] for name in ("loss", "imbalance", "max_logit")}
        for variant in (*BALANCE, *CLIP)
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1", type=integers, help="comma-separated integers (default: 0,1)")
    parser.add_argument("--steps", default=300, type=int, help="of every run (default: 300)")
    parser.add_argument("--rows", default="runs/stability.json", type=Path, help="file of the finished rows")
    o = parser.parse_args(argv)
    made = complete_rows(o.rows, o.seeds, [*BALANCE, *CLIP], partial(measure, o.steps))
    print(json.dumps(summarize(made, o.seeds)))


if __name__ == "__main__":
    main()
