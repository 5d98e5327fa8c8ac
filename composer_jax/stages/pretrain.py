"""Continued pretraining on real source code, mixed with the copy curriculum and repair exercises."""

from composer_jax.agent.exercises import repair_exercises
from composer_jax.data.pipeline import heldout_batches, pretraining_batches
from composer_jax.observe.metrics import MetricsWriter, read_metrics
from composer_jax.rl.rollout import seed_of
from composer_jax.stages.run import Run
from composer_jax.train.loop import FitPlan, fit
from composer_jax.train.losses import LanguageLoss


def pretrain(run: Run) -> None:
    """Leaves checkpoints/pretrain and metrics/pretrain.jsonl."""
    if run.workdir.stage_done("pretrain"):
        return
    settings = run.settings.pretrain
    with run.stage("pretrain") as result:
        tok = run.tokenizer
        train = run.documents(run.corpus.train, "source")
        heldout = run.documents(run.corpus.heldout, "held-out source")
        stream = pretraining_batches(
            train,
            seq_len=settings.seq_len,
            batch_size=settings.batch_size,
            seed=run.settings.seed,
            eod=tok.eod,
            vocab_size=tok.vocab_size,
            copy_fraction=settings.copy_fraction,
            # Every stage has a stream of tasks of its own: none repeats what an earlier one trained.
            exercises=repair_exercises(
                seed_of("pretrain", run.settings.seed), settings.exercises, tok, train_module=True
            ),
            exercise_fraction=settings.exercise_fraction,
        )
        learner = run.learner(
            run.optimizer(settings.optimizer, settings.steps),
            LanguageLoss(settings.mtp_weight, settings.balance_weight),
            settings.bias_rate,
        )
        state = learner.init_state(*run.definition.init(run.settings.seed, run.mesh))
        plan = FitPlan("pretrain", settings.steps, settings.save_every, settings.evaluate_every)
        path = run.path / "metrics" / "pretrain.jsonl"
        with run.store("pretrain") as store, MetricsWriter(path) as metrics:
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
        rows = read_metrics(path)
        nll = [row["heldout_nll"] for row in rows if row.get("heldout_nll") is not None]
        speeds = sorted(row["tokens_per_s"] for row in rows if row.get("tokens_per_s"))
        result |= {
            "heldout_nll_first": nll[0],
            "heldout_nll_last": nll[-1],
            "tokens": rows[-1]["tokens"],
            "train_tokens_per_s": speeds[len(speeds) // 2],
        }
