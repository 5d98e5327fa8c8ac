"""Continued pretraining on real source code, mixed with the copy curriculum and repair exercises."""

from typing import Any

from composer_jax.data.pipeline import heldout_batches, pretraining_batches
from composer_jax.data.sources import SourceConfig, SourceInputs, make_sources
from composer_jax.observe.metrics import read_metrics
from composer_jax.parallel.processes import is_first_process
from composer_jax.stages.run import Run
from composer_jax.stages.settings import PretrainSettings
from composer_jax.train.loop import FitPlan, fit
from composer_jax.train.losses import LanguageLossConfig, make_loss


def pretrain(run: Run) -> None:
    """Leaves checkpoints/pretrain and metrics/pretrain.jsonl."""
    if run.done("pretrain"):
        return
    settings = run.settings.pretrain
    with run.stage("pretrain") as result:
        tok = run.tokenizer
        train, heldout = run.documents("train"), run.documents("heldout")
        inputs = SourceInputs(train, tok, run.settings.seed)
        stream = pretraining_batches(
            make_sources(_sources(settings), inputs),
            seq_len=settings.seq_len,
            batch_size=settings.batch_size,
            seed=run.settings.seed,
        )
        learner = run.learner(
            run.optimizer(settings.optimizer, settings.steps),
            make_loss(LanguageLossConfig(mtp_weight=settings.mtp_weight, balance_weight=settings.balance_weight)),
            settings.bias_rate,
        )
        state = learner.init_state(*run.definition.init(run.settings.seed, run.mesh))
        plan = FitPlan("pretrain", settings.steps, settings.save_every, settings.evaluate_every)
        with run.store("pretrain") as store, run.metrics("pretrain") as metrics:
            fit(
                learner,
                state,
                stream,
                plan,
                store=store,
                metrics=metrics,
                heldout=lambda: heldout_batches(
                    heldout, seq_len=settings.seq_len, batch_size=settings.batch_size, eod=tok.eod
                ),
            )
        if is_first_process():
            result |= _found(read_metrics(metrics.path))


def _sources(settings: PretrainSettings) -> list[SourceConfig]:
    weights = (
        1 - settings.copy_fraction - settings.exercise_fraction,
        settings.copy_fraction,
        settings.exercise_fraction,
    )
    return [
        SourceConfig("documents", weights[0]),
        SourceConfig("composer_jax.demo.copying:copy_curriculum", weights[1]),
        SourceConfig("composer_jax.demo.exercises:pretraining_exercises", weights[2], {"count": settings.exercises}),
    ]


def _found(rows: list[dict[str, Any]]) -> dict[str, float]:
    nll = [row["heldout_nll"] for row in rows if row.get("heldout_nll") is not None]
    speeds = sorted(row["tokens_per_s"] for row in rows if row.get("tokens_per_s"))
    return {
        "heldout_nll_first": nll[0],
        "heldout_nll_last": nll[-1],
        "tokens": rows[-1]["tokens"],
        "train_tokens_per_s": speeds[len(speeds) // 2],
    }
