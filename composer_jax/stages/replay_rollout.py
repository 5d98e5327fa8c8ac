"""RL's rollout alone: plays the recorded tasks of a run again with any weights, and learns nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_jax.agent.episode import Episode
from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.base_model import check_base_model, load_base_weights
from composer_jax.errors import UserError
from composer_jax.observe.progress import Progress
from composer_jax.rl.group_source import GroupSource
from composer_jax.rl.ledger import BatchRecord, RolloutLedger, tokenizer_file
from composer_jax.rl.played_group import PlayedGroup
from composer_jax.rl.records import RolloutRecords
from composer_jax.rl.rollout import require_graded, roll_out
from composer_jax.stages.run import Run
from composer_jax.tasks.source import TaskSource


def play_records(run: Run, records: RolloutRecords, policy: str, out: Path) -> dict[str, Any]:
    """Plays the episodes of all recorded steps again, with the same tasks, seeds and triggers, and records them.

    Groups that `out` has already are not played again, so that a stopped rollout goes on.

    Args:
      policy: address of weights for the run's network (checkpoint/address.py); their version is 0.
      out: folder of the new records, in which `launch.replay` finds them as in a run.

    Returns:
      steps, groups, episodes. graded: episodes with a grade. grade: its mean over those. sampled_tokens: of all
      episodes. compared, same_tokens: episodes whose group the records still have, and those of them in which the same
      tokens were sampled.

    Raises:
      UserError: there are no recorded steps, the config has other tasks, the weights are of another network, or `out`
        is the folder of the records or has episodes of another policy.
    """
    if not records.batches:
        raise UserError(f"{records.folder} has no recorded step to play.")
    check_base_model(policy, run.config.model)
    config, source = run.config.rl, _source(run, records)
    _claim(out, policy, records)
    names = ("episodes", "graded", "solved", "sampled_tokens", "compared", "same_tokens")
    counts: dict[str, float] = dict.fromkeys(names, 0)
    replays = config.route_shape(run.config.model) is not None
    with run.services.episode_context(return_routing=replays) as (context, loop), RolloutLedger(out) as ledger:
        ledger.note_tokenizer(run.model.tokenizer.fingerprint)
        run.services.only_fitting = True
        sampler = run.services.sampler_with(
            *load_base_weights(policy, run.model.definition, run.mesh, run.config.seed), version=0
        )
        numbers = [number for record in records.batches for number in record.groups]
        played = sum(map(ledger.has, numbers)) * config.group_size
        with Progress(len(numbers) * config.group_size, "episode", "play", initial=played) as progress:
            for record in records.batches:
                missing = [number for number in record.groups if not ledger.has(number)]
                specs = [spec for number in missing for spec in source.specs(number)]
                played_now = loop.run(roll_out(specs, sampler, context, lambda _: progress.update(1)))
                require_graded(played_now)
                for i, number in enumerate(missing):
                    episodes = played_now[i * config.group_size : (i + 1) * config.group_size]
                    ledger.admit(number, record.step - 1, records.places[number])
                    ledger.store(PlayedGroup(number, episodes, record.step - 1, resolved_version=0))
                groups = [ledger.load(number) for number in record.groups]
                ledger.begin_step(BatchRecord.of(record.step, 0, groups))
                _count(counts, groups, records)
    graded = counts.pop("graded")
    grade = counts.pop("solved") / graded if graded else None
    return {"steps": len(records.batches), "groups": len(numbers), "graded": graded, "grade": grade, **counts}


def _source(run: Run, records: RolloutRecords) -> GroupSource:
    """Returns the source of the recorded groups. Raises a UserError if the config has other tasks in their places."""
    # Not run.services.tasks, which does without the tasks of RL once it is done.
    tasks = TaskSource(run.config.seed, run.config.tasks, network=run.config.sandbox.network)
    source = GroupSource(run.config.rl, run.config.agent, run.config.seed, tasks)
    source.restore(records.places)
    for record in records.batches:
        for number, recorded in zip(record.groups, record.tasks, strict=True):
            if (found := source.task(number).id) != recorded:
                raise UserError(
                    f"Group {number} of {records.folder} played the task {recorded}, and with this config it is "
                    f"{found}; use the seed and the tasks of the recorded run."
                )
    return source


def _claim(out: Path, policy: str, records: RolloutRecords) -> None:
    """Notes whose episodes `out` has, before the first is played. Raises a UserError if they are those of another."""
    if out.absolute() == records.folder.absolute():
        raise UserError(f"--out={out} is the folder of the records; name another one.")
    file = out / "policy.txt"
    if file.exists() and (other := file.read_text(encoding="utf-8")) != policy:
        raise UserError(f"--out={out} has episodes of the policy {other}; name another folder for those of {policy}.")
    if tokenizer_file(out).exists() and not file.exists():
        raise UserError(f"--out={out} is the folder of a run; name another one.")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(file, policy.encode())


def _count(counts: dict[str, float], groups: Sequence[PlayedGroup], records: RolloutRecords) -> None:
    for group in groups:
        graded = [episode for episode in group.episodes if episode.reward is not None]
        counts["episodes"] += len(group.episodes)
        counts["graded"] += len(graded)
        counts["solved"] += sum(episode.reward or 0 for episode in graded)
        counts["sampled_tokens"] += sum(episode.transcript.total_sampled for episode in group.episodes)
        if records.has(group.number):
            pairs = list(zip(group.episodes, records.load(group.number).episodes, strict=True))
            counts["compared"] += len(pairs)
            counts["same_tokens"] += sum(_tokens(new) == _tokens(old) for new, old in pairs)


def _tokens(episode: Episode) -> list[list[int]]:
    return [row.tokens.tolist() for row in episode.transcript.rows()]
