"""Supervised fine-tuning on traces of conversations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.data.pipeline import trace_batches
from composer_jax.data.token_source import Trace
from composer_jax.data.trace_file import read_traces, write_traces
from composer_jax.errors import UserError
from composer_jax.observe.metrics import read_metrics
from composer_jax.parallel.processes import broadcast_from_process0, is_first_process
from composer_jax.schema.training_config import TraceSourceConfig
from composer_jax.stages.memory_check import memory_check
from composer_jax.stages.periodic_evaluation import PeriodicEvaluation, SuitesBetweenSteps
from composer_jax.stages.rows_page import write_rows_page
from composer_jax.stages.run import Run
from composer_jax.stages.shared_files import make_shared
from composer_jax.stages.trace_sources import SourceContext, make_trace_source
from composer_jax.train.loop import FitPlan, fit


def sft(run: Run) -> None:
    """Leaves checkpoints/sft, metrics/sft.jsonl and metrics/evaluate_sft.jsonl.

    For rl.replay it leaves the conversations as well, in data/sft_conversations.npz.
    """
    if run.is_done("sft"):
        return
    before = run.model.stage_before("sft")
    if before is not None:
        broadcast_from_process0(lambda: run.workdir.stage_result(before))  # raises before experts play for minutes
    broadcast_from_process0(run.services.check)
    config = run.config.sft
    with memory_check(run, "sft"), run.stage("sft") as result, PeriodicEvaluation(run, "sft") as periodic:
        traces, reports = collect_traces(run)
        if run.config.replays_sft:
            _store_conversations(run, traces)
        # A report can outgrow a row; the model could not have seen it whole in its window either.
        stream = trace_batches(traces, seq_len=config.seq_len, batch_size=config.batch_size, seed=run.config.seed)
        params, router_bias = run.model.weights_before("sft")  # after the traces, in which a bad line ends the stage
        learner = run.model.learner("sft")
        state = learner.init_state(params, router_bias)
        del params, router_bias  # a copy of them is trained, and they would take memory beside it
        utilisation = run.model.utilisation("sft")
        plan = FitPlan("SFT", config.steps, config.save_every, 0, config.accumulate, utilisation)
        with run.model.store("sft") as store, run.metrics("sft") as metrics:
            evaluation = SuitesBetweenSteps(run, "sft", periodic)
            trace = run.trace("sft")
            fit(learner, state, stream, plan, store=store, metrics=metrics, evaluation=evaluation, trace=trace)
        if is_first_process():
            rows = read_metrics(metrics.path)
            last = [row["loss"] for row in rows[-max(1, len(rows) // 20) :]]
            result |= {
                "loss_last": float(np.mean(last)),
                "tokens": rows[-1]["tokens"],
                "dropped_rows": stream.dropped,
                "skipped_steps": sum(row["skipped"] for row in rows),
                **reports,
            }


def show_rows(run: Run, count: int) -> Path:
    """Writes a page with the first `count` training rows and returns its path; nothing is trained.

    Raises UserError for a count below 1, and for rows that `sft` would refuse.
    """
    if count < 1:
        raise UserError(f"--show_rows={count} shows nothing; give a number of rows from 1.")
    traces, _ = collect_traces(run)
    return write_rows_page(run.path, traces[:count], run.model.tokenizer, len(traces))


def source_context(run: Run) -> SourceContext:
    """Returns what the sources of a run may use of it."""
    config, model = run.config, run.model
    return SourceContext(
        config.seed, model.tokenizer, model.chat, config.agent, run.data.folder, config.sft.seq_len, run.workdir
    )


def sft_conversations(run: Run) -> list[Trace]:
    """Returns the conversations that SFT trains in a run, for rl.replay: those that fit into its rows.

    SFT has stored them, token ids and all. Where it did not run, as in RL that starts from a checkpoint, the sources of
    config.sft make them as SFT would, once, and they are stored then. Several processes call it alike.
    """
    path = _conversations_file(run)
    if not broadcast_from_process0(path.exists):
        _store_conversations(run, collect_traces(run)[0])
    traces = read_traces(make_shared(run.workdir, lambda: path))
    return [trace for trace in traces if len(trace[0]) <= run.config.sft.seq_len]


def _store_conversations(run: Run, traces: Sequence[Trace]) -> None:
    make_shared(run.workdir, lambda: write_traces(_conversations_file(run), traces))


def _conversations_file(run: Run) -> Path:
    return run.data.folder / "sft_conversations.npz"


def collect_traces(run: Run) -> tuple[list[Trace], dict[str, Any]]:
    """Returns the traces of all sources, in the order of the config, and the sources' reports."""
    context = source_context(run)
    sources = dict(run.config.sft.sources)
    if run.config.sft.data:
        bad = run.config.sft.bad_rows
        options = {"files": run.config.sft.data, "invalid": bad, "too_long": bad}
        sources["data"] = TraceSourceConfig("conversations", options)
    if not sources:
        raise UserError(
            "SFT has nothing to train on: config.sft.data and config.sft.sources are empty; name a file of "
            "conversations as --config.sft.data=FILE."
        )
    traces: list[Trace] = []
    reports: dict[str, Any] = {}
    for name, config in sources.items():
        source = make_trace_source(name, config, context)
        traces += source.traces()
        for key, value in source.report().items():  # two sources of a kind report under one key
            both = isinstance(value, Mapping) and isinstance(reports.get(key), Mapping)
            reports[key] = {**reports[key], **value} if both else value
    return traces, reports
