"""Writes episodes as files of conversations: of a run's experts, recorded by a run, or sampled for the file."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec

from composer_jax.agent.conversation_rows import episode_rows, record_rows
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.checkpoint.base_model import check_base_model, load_base_weights
from composer_jax.errors import UserError
from composer_jax.observe.episodes import EpisodeRecord, read_episodes
from composer_jax.observe.progress import Progress
from composer_jax.rl.rollout import roll_out
from composer_jax.seeds import hash_seed
from composer_jax.stages.run import Run
from composer_jax.stages.sft import source_context
from composer_jax.stages.trace_sources import EpisodeSource, make_trace_source
from composer_jax.storage.bucket import is_url
from composer_jax.storage.local_copy import local_copy
from composer_jax.tasks.formats import ReadOptions, read_tasks
from composer_jax.tasks.network import require_network
from composer_jax.tasks.task import Task

RenderRows = Callable[[], list[dict[str, Any]] | None]
"""Returns the conversations of an episode; None if a call in it is malformed."""


@dataclass
class TraceStats:
    """What was written, and what was left out."""

    conversations: int = 0
    episodes: int = 0
    below_min_reward: int = 0
    malformed: int = 0
    """Recorded episodes with a call that could not be parsed, of which a record has too little."""


def write_expert_traces(run: Run, out: str, min_reward: float | None = None) -> TraceStats:
    """Plays the experts of config.sft.sources and writes their episodes to `out`, one conversation a line.

    min_reward: leaves out episodes with less reward; None leaves out none.

    Raises UserError if no source of the config plays episodes, or `out` cannot be written.
    """
    context = source_context(run)
    sources = {name: make_trace_source(name, config, context) for name, config in run.config.sft.sources.items()}
    players = [source for source in sources.values() if isinstance(source, EpisodeSource)]
    if not players:
        raise UserError(
            f"none of config.sft.sources ({', '.join(sources) or 'empty'}) plays episodes; name one that does."
        )
    episodes = (
        (episode.reward, partial(episode_rows, episode, task, run.model.chat, source.system_prompt))
        for source in players
        for task, episode in source.play()
    )
    return _write(out, episodes, min_reward)


def write_recorded_traces(run: Run, names: Sequence[str], out: str, min_reward: float | None = None) -> TraceStats:
    """Writes the recorded episodes of a run (RUN/episodes/NAME.jsonl) to `out`, one conversation a line.

    Raises UserError if there are no such records, they are of an older version, or `out` cannot be written.
    """

    def rows(record: EpisodeRecord) -> list[dict[str, Any]] | None:
        try:
            return record_rows(record, run.config.agent.system_prompt)
        except ValueError:  # a call is malformed
            return None

    def episodes() -> Iterator[tuple[float | None, RenderRows]]:
        for name in names:
            path = run.path / "episodes" / f"{name}.jsonl"
            records = read_episodes(path)
            if not records:
                there = ", ".join(sorted(file.stem for file in path.parent.glob("*.jsonl"))) or "none"
                raise UserError(f"{path} holds no recorded episodes; name some of {there}.")
            if not all(record.tools for record in records):
                raise UserError(f"{path} was recorded by an older version, without the tools of tasks; record it anew.")
            for record in records:
                yield record.reward, partial(rows, record)

    return _write(out, episodes(), min_reward)


def write_sampled_traces(
    run: Run, policy: str, tasks: Sequence[str], attempts: int, out: str, min_reward: float | None = None
) -> TraceStats:
    """Lets a policy attempt tasks and writes its episodes to `out`, one conversation a line, with the sampled ids.

    Raises UserError for weights of another network, no such tasks, nothing to write, or a file that cannot be written.

    Args:
      policy: address of weights for the run's network (checkpoint/address.py).
      tasks: "FAMILY:COUNT" for tasks that a family of tasks.families generates, none of which RL or evaluation sees, or
        paths of tasks.
      attempts: episodes of each task. Episodes are not summarized.
    """
    if attempts < 1:
        raise UserError(f"{attempts} attempts at a task sample nothing; use at least 1.")
    check_base_model(policy, run.config.model)
    chosen, seed = find_tasks(run, tasks), run.config.seed
    compaction = run.config.agent.compaction("none", "agent.compactions")
    specs = [
        EpisodeSpec(task, hash_seed("traces", seed, task.id, attempt), compaction, group)
        for group, task in enumerate(chosen)
        for attempt in range(attempts)
    ]
    with run.services.episode_context() as (context, loop):
        sampler = run.services.sampler_with(
            *load_base_weights(policy, run.model.definition, run.mesh, run.config.seed), version=0
        )
        with Progress(len(specs), "episode", "sample") as progress:
            episodes = loop.run(roll_out(specs, sampler, context, lambda _: progress.update(1)))

    render = partial(episode_rows, chat=run.model.chat, system_prompt=run.config.agent.system_prompt)
    played = zip(specs, episodes, strict=True)
    return _write(out, ((e.reward, partial(render, e, spec.task)) for spec, e in played), min_reward)


def find_tasks(run: Run, names: Sequence[str]) -> list[Task]:
    """Returns the tasks that "FAMILY:COUNT" and paths name. Raises UserError for a name that is neither."""
    found: list[Task] = []
    config = run.config.tasks
    for name in names:
        family, _, count = name.rpartition(":")
        if family in config.families and count.isdigit():
            seed = hash_seed("traces", run.config.seed) % 2**31
            found += [run.services.tasks.generate(family, "train", seed, index) for index in range(int(count))]
        elif is_url(name) or Path(name).expanduser().exists():
            repos, packages = (local_copy(path) if path else None for path in (config.repos, config.packages))
            options = ReadOptions(repos=repos, packages=packages, tools=config.tools, formats=config.formats)
            found += read_tasks(local_copy(name), options)
        else:
            families = ", ".join(config.families) or "none"
            raise UserError(
                f"{name!r} names no tasks; use a path, or FAMILY:COUNT for a family of tasks.families ({families})."
            )
    require_network(found, run.config.sandbox.network)
    return found


def _write(out: str, episodes: Iterable[tuple[float | None, RenderRows]], min_reward: float | None) -> TraceStats:
    """Writes the file when all rows are made. Raises a UserError if there are none or it cannot be written.

    episodes: reward and rows of each.
    """
    written, lines = TraceStats(), []
    for reward, render in episodes:
        if min_reward is not None and (reward is None or reward < min_reward):
            written.below_min_reward += 1
        elif (rows := render()) is None:
            written.malformed += 1
        else:
            written.episodes += 1
            lines += [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    written.conversations = len(lines)
    if not lines:
        raise UserError(
            f"no conversation is left to write to {out}: {written.below_min_reward} episodes have less than the least "
            f"reward, and {written.malformed} a malformed call."
        )
    try:
        with fsspec.open(out, "wb", auto_mkdir=True) as file:
            file.write("".join(lines).encode())  # pyright: ignore[reportAttributeAccessIssue]
    except Exception as error:  # remote file systems raise exceptions of their own types
        raise UserError(f"{out} cannot be written ({error}); choose another place.") from error
    return written
