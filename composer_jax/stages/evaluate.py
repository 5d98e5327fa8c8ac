"""Evaluation on held-out tasks: of the base, before RL, and after RL."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_record import build_episode_record
from composer_jax.errors import UserError
from composer_jax.evals.config import HELDOUT, WHICH
from composer_jax.evals.suite import Suite, SuiteResult, compaction_error, run_suite
from composer_jax.observe.episodes import EpisodeRecord, write_episodes
from composer_jax.observe.progress import Progress
from composer_jax.parallel.processes import broadcast_from_process0, is_first_process
from composer_jax.sampler.sampler import Sampler
from composer_jax.stages.rollout_workers import play_share
from composer_jax.stages.run import Run

GREEDY = "greedy"


def evaluations(run: Run) -> list[str]:
    """Returns the evaluations that the run has, of evals/config.py: WHICH, in their order.

    "base" is left out where RL starts from the base itself, which "before" then measures. "greedy" and "after" are left
    out without RL. Raises UserError if evaluate.which names none of them.
    """
    has = {
        "base": bool(run.config.base) and run.model.stage_before("rl") is not None,
        "before": True,
        GREEDY: "rl" in run.config.stages,
        "after": "rl" in run.config.stages,
    }
    chosen = [which for which in WHICH if has[which] and which in run.config.evaluate.which]
    if not chosen:
        there = ", ".join(which for which in WHICH if has[which])
        raise UserError(f"evaluate.which={run.config.evaluate.which} leaves no evaluation; this run has {there}.")
    return chosen


def policy_stage(run: Run, which: str) -> str | None:
    """Returns the training stage whose weights an evaluation measures; None for the run's initial weights."""
    before = run.model.stage_before("rl")
    return {"base": None, "before": before, GREEDY: before, "after": "rl"}[which]


def temperature(run: Run, which: str) -> float:
    """Returns the temperature of an evaluation's policy."""
    return 0.0 if which == GREEDY else run.config.evaluate.temperature


def is_ready(run: Run, which: str) -> bool:
    """Returns whether the weights that an evaluation measures are there."""
    stage = policy_stage(run, which)
    return stage is None or run.is_done(stage)


def suites(run: Run, which: str) -> dict[str, Suite]:
    """Returns the suites of evaluate.suites, then one per family of tasks.heldout with all its tasks."""
    attempts = {"attempts": 1} if which == GREEDY else {}  # all attempts would be the same
    config, agent, tasks, seed = run.config.evaluate, run.config.agent, run.services.tasks, run.config.seed
    generated = {
        name: Suite(
            name,
            [tasks.generate(suite.family, suite.split, seed, i) for i in range(suite.tasks)],
            suite.attempts,
            agent.compaction(suite.compaction, f"evaluate.suites.{name}.compaction"),
            seed,
            config.effort,
        )
        for name, suite in config.suites.items()
    }
    compaction = agent.compaction(config.heldout_compaction, "evaluate.heldout_compaction")
    from_disk = {
        (name := f"{HELDOUT}{family}"): Suite(
            name, family_tasks, config.heldout_attempts, compaction, seed, config.effort
        )
        for family, family_tasks in tasks.heldout.items()
    }
    return {name: dataclasses.replace(suite, **attempts) for name, suite in (generated | from_disk).items()}


def evaluate(run: Run, which: str) -> None:
    """Measures all suites and leaves episodes/WHICH.jsonl. Every process must call it; all of them play.

    Args:
      which: "base" (the untouched base), "before" (the policy that RL starts from), "greedy" (its most probable tokens)
      or "after" (the policy that RL left).
    """
    name = f"evaluate_{which}"
    if run.is_done(name):
        return
    broadcast_from_process0(lambda: len(run.services.tasks.heldout))  # refuses tasks before weights are loaded
    stage = policy_stage(run, which)
    weights = run.model.initial_weights() if stage is None else run.model.weights_of(stage)
    with run.stage(name) as result:
        sampler = run.services.sampler_with(*weights, version=0)
        if is_first_process():
            chosen = suites(run, which)
            broadcast_from_process0(lambda: len(chosen))
            result |= _play(run, which, chosen, sampler)
        else:
            count = broadcast_from_process0(lambda: 0)
            with play_share(run.config.agent.concurrency):
                for _ in range(count):
                    sampler.follow()


def _play(run: Run, which: str, chosen: Mapping[str, Suite], sampler: Sampler) -> dict[str, Any]:
    result, records = play_suites(run, chosen, sampler, temperature(run, which), WHICH[which])
    if which != GREEDY:  # a report has the episodes that were sampled
        write_episodes(run.path / "episodes" / f"{which}.jsonl", records)
    return result


def play_suites(
    run: Run, chosen: Mapping[str, Suite], sampler: Sampler, temperature: float, title: str
) -> tuple[dict[str, Any], list[EpisodeRecord]]:
    """Plays suites with the weights of a sampler; returns what an evaluation stores, and records for a report.

    Args:
      title: what the progress says.

    Raises:
      UserError: the infrastructure lost all episodes of a suite.
    """
    measures: dict[str, SuiteResult] = {}
    records: list[EpisodeRecord] = []

    async def play() -> None:
        for name, suite in chosen.items():
            on_done = lambda _, name=name: progress.update(1, suite=name)  # noqa: E731
            measures[name], episodes = await run_suite(suite, sampler, context, on_done, workers.play)
            records.extend(_records(run, suite, episodes))

    with run.services.episode_context(temperature=temperature) as (context, loop):
        workers = run.services.rollout_workers(context)
        decoded, busy = sampler.decoded_tokens, sampler.busy_seconds
        with Progress(sum(len(s.specs()) for s in chosen.values()), "episode", title) as progress:
            loop.run(workers.serve(play()))
        result = {
            "suites": suite_results(run, measures),
            "decode_tokens_per_s": (sampler.decoded_tokens - decoded) / (sampler.busy_seconds - busy),
            "sandbox_runs": context.cache.runs,
            "sandbox_hits": context.cache.hits,
        }
    return result, records


def suite_results(run: Run, measures: dict[str, SuiteResult]) -> dict[str, dict[str, Any]]:
    """Returns the measures of every suite as JSON values, with the compaction error where a suite has one."""
    results = {name: dataclasses.asdict(measure) for name, measure in measures.items()}
    for name, suite in run.config.evaluate.suites.items():
        if suite.compare_to:
            results[name]["compaction_error"] = compaction_error(measures[suite.compare_to], measures[name])
    return results


def _records(run: Run, suite: Suite, episodes: list[Episode]) -> list[EpisodeRecord]:
    config = run.config.evaluate
    generated = config.suites.get(suite.name)
    condition = generated.compaction if generated else config.heldout_compaction
    return [
        build_episode_record(episode, task, run.model.chat, condition=condition)
        for i, task in enumerate(suite.tasks[: config.recorded_tasks])
        for episode in episodes[i * suite.attempts : i * suite.attempts + min(2, suite.attempts)]
    ]
