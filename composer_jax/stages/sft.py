"""Supervised fine-tuning on tool-use traces of the scripted experts, mixed with repair exercises."""

import dataclasses
import io
from pathlib import Path

import numpy as np

from composer_jax.agent.episode import Limits
from composer_jax.agent.summary import Compaction
from composer_jax.atomic_write import write_atomically
from composer_jax.data.pipeline import Trace, trace_batches
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.demo import bugfix, recall
from composer_jax.demo.exercises import repair_exercises
from composer_jax.demo.expert import BugfixRates, Rates, RecallRates, make_traces
from composer_jax.demo.generate import generate
from composer_jax.errors import UserError
from composer_jax.event_loop import EventLoop
from composer_jax.observe.metrics import read_metrics
from composer_jax.observe.progress import Progress
from composer_jax.parallel.processes import broadcast_from_process0, is_first_process
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.seeds import hash_seed
from composer_jax.stages.run import Run
from composer_jax.train.loop import FitPlan, fit

SORTS = {
    "bugfix": bugfix.FAMILY,
    "recall_short": recall.FAMILY,
    "recall_long": recall.FAMILY,
    "recall_uncompacted": recall.FAMILY,
}


def sft(run: Run) -> None:
    """Leaves checkpoints/sft and metrics/sft.jsonl."""
    if run.done("sft"):
        return
    params, router_bias = run.weights_of("pretrain")
    broadcast_from_process0(run.check)
    settings = run.settings.sft
    with run.stage("sft") as result:
        traces, made = expert_traces(run)
        stream_of_tasks = hash_seed("sft exercises", run.settings.seed)
        traces += repair_exercises(stream_of_tasks, settings.exercises, run.tokenizer, train_module=False)
        # A report can outgrow a row; the model could not have seen it whole in its window either.
        stream = trace_batches(
            traces, seq_len=settings.seq_len, batch_size=settings.batch_size, seed=run.settings.seed, too_long="drop"
        )
        learner = run.learner(run.optimizer(settings.optimizer, settings.steps), bias_rate=settings.bias_rate)
        state = learner.init_state(params, router_bias)
        with run.store("sft") as store, run.metrics("sft") as metrics:
            fit(
                learner,
                state,
                stream,
                FitPlan("SFT", settings.steps, settings.save_every, 0),
                store=store,
                metrics=metrics,
            )
        if is_first_process():
            rows = read_metrics(metrics.path)
            last = [row["loss"] for row in rows[-max(1, len(rows) // 20) :]]
            result |= {
                "loss_last": float(np.mean(last)),
                "tokens": rows[-1]["tokens"],
                "dropped_rows": stream.dropped,
                **made,
            }


def expert_traces(run: Run) -> tuple[list[Trace], dict]:
    """Every branch of every expert episode as (tokens, sampled mask); made once, then read from disk.

    The first process makes them, the others need no sandbox.
    """
    path, tokenizer = run.path / "data" / "traces.npz", run.tokenizer
    broadcast_from_process0(lambda: None if path.exists() else _make(run, tokenizer, path))
    with np.load(path) as file:
        ends = np.cumsum(file["lengths"])[:-1]
        traces = list(
            zip(np.split(file["tokens"].astype(np.int32), ends), np.split(file["trained"], ends), strict=True)
        )
        made = {"expert_reward": {sort: float(file[f"reward_{sort}"]) for sort in SORTS if f"reward_{sort}" in file}}
        return traces, made


def _make(run: Run, tokenizer: Tokenizer, path: Path) -> None:
    settings = run.settings
    unknown = sorted(set(settings.sft.traces) - set(SORTS))
    if unknown:
        raise UserError(f"sft.traces names {unknown[0]!r}; the sorts of traces are {', '.join(SORTS)}.")
    tasks, compactions = [], []
    for sort, n in sorted(settings.sft.traces.items()):
        # Tasks of SFT and RL come from different streams of the training split, so RL repeats none of them.
        tasks += [generate(SORTS[sort], "train", hash_seed("sft", settings.seed, sort), i) for i in range(n)]
        compactions += [compaction_for(run, sort)] * n
    rates = _rates(settings.sft.rates)

    async def make(progress: Progress):
        async with LocalSandboxPool(size=settings.agent.concurrency) as pool:
            limits = Limits(settings.agent.max_turns, 10_000, 10_000)
            return await make_traces(
                tasks,
                lambda task, index: compactions[index],
                pool,
                tokenizer,
                limits=limits,
                seed=settings.seed,
                rates=rates,
                concurrency=settings.agent.concurrency,
                on_done=lambda episode: progress.update(1),
            )

    with EventLoop() as loop, Progress(len(tasks), "trace", "expert traces") as progress:
        episodes = loop.run(make(progress))
    rows = [row for episode in episodes for row in episode.transcript.rows()]
    rewards, first = {}, 0
    for sort, n in sorted(settings.sft.traces.items()):
        graded = [e.reward for e in episodes[first : first + n] if e.reward is not None]
        if graded:
            rewards[f"reward_{sort}"] = np.float32(np.mean(graded))
        first += n
    fields = {
        "tokens": np.concatenate([r.tokens for r in rows]),
        "trained": np.concatenate([r.trained for r in rows]),
        "lengths": np.array([len(r.tokens) for r in rows], np.int32),
        **rewards,
    }
    write_atomically(path, _npz(fields))


def compaction_for(run: Run, sort: str) -> Compaction:
    """How an expert trace of this sort is compacted."""
    agent = run.settings.agent
    if sort == "recall_short":
        return Compaction(agent.trigger, "short", agent.max_segments, agent.max_summary_tokens)
    if sort == "recall_long":
        return Compaction(agent.trigger, "long", agent.max_segments, agent.max_report_tokens)
    return Compaction(None)


def _rates(overrides) -> Rates:
    built = {}
    for family, cls in (("bugfix", BugfixRates), ("recall", RecallRates)):
        fields = dict(overrides.get(family, {}))
        unknown = sorted(set(fields) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise UserError(
                f"sft.rates.{family}.{unknown[0]} is unknown; the rates are "
                f"{', '.join(f.name for f in dataclasses.fields(cls))}."
            )
        built[family] = cls(**fields)
    return Rates(**built)


def _npz(fields: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **fields)
    return buffer.getvalue()
