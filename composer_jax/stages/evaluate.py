"""Evaluation on held-out tasks, before and after RL."""

import dataclasses

from composer_jax.agent.episode_record import build_episode_record
from composer_jax.agent.summary import Compaction
from composer_jax.demo import bugfix, recall
from composer_jax.demo.generate import generate
from composer_jax.evals.suite import Suite, compaction_error, run_suite
from composer_jax.observe.episodes import write_episodes
from composer_jax.observe.progress import Progress
from composer_jax.parallel.processes import require_one_process
from composer_jax.stages.run import Run

POLICIES = {"before": "sft", "after": "rl"}
"""Which checkpoint each evaluation looks at."""


def suites(run: Run) -> dict[str, Suite]:
    """What is measured. Names, files and constants of generated tasks never occur in a training task; those of
    tasks.heldout are all attempted, with summaries, since they may be long."""
    settings, agent = run.settings.evaluate, run.settings.agent
    seed = run.settings.seed

    def tasks(family, split):
        return [generate(family, split, seed, i) for i in range(settings.tasks)]

    whole = Compaction(None)
    short = Compaction(agent.trigger, "short", agent.max_segments, agent.max_summary_tokens)
    long = Compaction(agent.trigger, "long", agent.max_segments, agent.max_report_tokens)
    recall_tasks = tasks(recall.FAMILY, "heldout")
    return {
        "bugfix": Suite("bugfix", tasks(bugfix.FAMILY, "heldout"), settings.attempts, whole, seed),
        "unseen": Suite("unseen", tasks(bugfix.FAMILY, "unseen"), settings.other_attempts, whole, seed),
        "recall_whole": Suite("recall_whole", recall_tasks, settings.other_attempts, whole, seed),
        "recall_short": Suite("recall_short", recall_tasks, settings.other_attempts, short, seed),
        "recall_long": Suite("recall_long", recall_tasks, settings.other_attempts, long, seed),
        **{
            (name := f"{HELDOUT}{family}"): Suite(name, tasks, settings.other_attempts, short, seed)
            for family, tasks in run.tasks.heldout.items()
        },
    }


HELDOUT = "heldout_"
"""What the names of suites of tasks.heldout begin with; their family follows."""
CONDITIONS = {"bugfix": "default", "unseen": "default", "recall_whole": "no_trigger", "recall_long": "long"}
"""How the episodes of a suite are labelled; "short" where nothing is said."""


def evaluate(run: Run, which: str) -> None:
    """which: "before" (the SFT policy) or "after" (the RL policy). Leaves episodes/<which>.jsonl."""
    name = f"evaluate_{which}"
    require_one_process("evaluation")
    if run.workdir.stage_done(name):
        return
    weights = run.weights_of(POLICIES[which])
    with run.stage(name) as result, run.environment() as (environment, loop):
        run.sampler_with(*weights, version=0)
        chosen, records, results = suites(run), [], {}
        decoded, busy = run.sampler.decoded_tokens, run.sampler.busy_seconds
        with Progress(sum(len(s.jobs()) for s in chosen.values()), "episode", f"evaluate {which} RL") as progress:
            for suite in chosen.values():
                outcome, episodes = loop.run(
                    run_suite(
                        suite,
                        run.sampler,
                        environment,
                        lambda _, name=suite.name: progress.update(1, suite=name),
                    )
                )
                results[suite.name] = outcome
                tasks = {task.id: task for task in suite.tasks}
                for i in range(min(run.settings.evaluate.recorded_tasks, len(suite.tasks))):
                    for episode in episodes[i * suite.attempts : i * suite.attempts + 2]:
                        records.append(
                            build_episode_record(
                                episode,
                                tasks[episode.task_id],
                                run.chat,
                                condition=CONDITIONS.get(suite.name, "short"),
                            )
                        )
        write_episodes(run.path / "episodes" / f"{which}.jsonl", records)
        result |= {
            "suites": {name: dataclasses.asdict(r) for name, r in results.items()},
            "compaction_error": compaction_error(results["recall_whole"], results["recall_short"]),
            "compaction_error_long": compaction_error(results["recall_whole"], results["recall_long"]),
            "decode_tokens_per_s": (run.sampler.decoded_tokens - decoded) / (run.sampler.busy_seconds - busy),
            "sandbox_runs": environment.cache.runs,
            "sandbox_hits": environment.cache.hits,
        }
