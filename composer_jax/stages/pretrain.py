"""Continued pretraining on a mixture of sources."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from composer_jax.data.pipeline import heldout_batches, pretraining_batches
from composer_jax.data.sources import heldout_documents, make_sources
from composer_jax.data.token_source import SourceInputs
from composer_jax.observe.metrics import read_metrics
from composer_jax.parallel.processes import is_first_process
from composer_jax.schema.training_config import PretrainConfig
from composer_jax.seeds import hash_seed
from composer_jax.stages.memory_check import memory_check
from composer_jax.stages.run import Run
from composer_jax.train.loop import FitPlan, fit
from composer_jax.train.shard_batch import addressable_rows


def pretrain(run: Run) -> None:
    """Runs continued pretraining: the stage pretrain and the phases that config.stages names, in its order.

    Each leaves checkpoints/STAGE and metrics/STAGE.jsonl.
    """
    for stage in run.config.pretraining or ("pretrain",):
        pretrain_stage(run, stage)


def pretrain_stage(run: Run, stage: str) -> None:
    """Runs one of them, unless it is done. Raises UserError if the run skips it."""
    if run.is_done(stage):
        return
    config = run.config.training(stage)
    assert isinstance(config, PretrainConfig)
    # A phase reads the same sources in another order than the one before it.
    seed = run.config.seed if stage == "pretrain" else hash_seed(stage, run.config.seed)
    with memory_check(run, stage), run.stage(stage) as result:
        weights = run.model.weights_before(stage)
        tok = run.model.tokenizer
        train, heldout = run.data.documents("train"), run.data.documents("heldout")
        sources = make_sources(config.sources, SourceInputs(train, tok, seed), run.config.section(stage))
        stream = pretraining_batches(
            sources,
            seq_len=config.seq_len,
            batch_size=config.batch_size,
            seed=seed,
            final_weights={n: c.final_weight for n, c in config.sources.items() if c.final_weight is not None},
            steps=config.steps,
            read_rows=addressable_rows(run.stage_mesh(stage), config.batch_size, config.accumulate),
        )
        learner = run.model.learner(stage)
        state = learner.init_state(*weights)
        del weights  # a copy of them is trained, and they would take memory beside it
        one_pass = partial(heldout_batches, seq_len=config.seq_len, batch_size=config.micro_batch_size, eod=tok.eod)
        plan = FitPlan(
            stage,
            config.steps,
            config.save_every,
            config.evaluate_every,
            config.accumulate,
            run.model.utilisation(stage),
        )
        with run.model.store(stage) as store, run.metrics(stage) as metrics:
            fit(
                learner,
                state,
                stream,
                plan,
                store=store,
                metrics=metrics,
                heldout=partial(one_pass, heldout),
                heldout_sources={name: partial(one_pass, held) for name, held in heldout_documents(sources).items()},
                trace=run.trace(stage),
            )
        if is_first_process():
            result |= summarise_metrics(read_metrics(metrics.path))
            num_bytes = sum(file.num_bytes for file in run.data.corpus.heldout)
            result |= bits_per_byte(result, tokens=sum(map(len, heldout)), num_bytes=num_bytes)


def bits_per_byte(result: Mapping[str, float], *, tokens: int, num_bytes: int) -> dict[str, float]:
    """Returns heldout_bits_per_byte_first and _last, which compare networks whose tokenizers differ.

    tokens, num_bytes: of the held-out files. The first token of each piece of a file is not predicted; it counts as one
    of average loss.
    """
    factor = tokens / num_bytes / math.log(2)
    return {f"heldout_bits_per_byte_{which}": result[f"heldout_nll_{which}"] * factor for which in ("first", "last")}


def summarise_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the stage's results from its metrics: held-out loss first and last (nats per token), tokens, speed, and
    the number of steps whose gradient was not finite."""
    nll = [row["heldout_nll"] for row in rows if row.get("heldout_nll") is not None]
    speeds = sorted(row["tokens_per_s"] for row in rows if row.get("tokens_per_s"))
    return {
        "heldout_nll_first": nll[0],
        "heldout_nll_last": nll[-1],
        "tokens": rows[-1]["tokens"],
        "train_tokens_per_s": speeds[len(speeds) // 2],
        "skipped_steps": sum(row.get("skipped", 0) for row in rows),
    }
