"""Writes episodes as files of conversations: those of a run's experts, or those that a run recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from composer_jax.agent.conversation_rows import episode_rows, record_rows
from composer_jax.errors import UserError
from composer_jax.observe.episodes import read_episodes
from composer_jax.stages.run import Run
from composer_jax.stages.sft import source_context
from composer_jax.stages.trace_sources import EpisodeSource, make_trace_source


@dataclass
class Written:
    """What was written, and what was left out."""

    conversations: int = 0
    episodes: int = 0
    below_min_reward: int = 0
    malformed: int = 0
    """Recorded episodes with a call that could not be parsed, of which a record has too little."""


def write_expert_traces(run: Run, out: str, min_reward: float | None = None) -> Written:
    """Plays the experts of config.sft.sources and writes their episodes to `out`, one conversation a line.

    min_reward: leaves out episodes with less reward; None leaves out none.

    Raises:
      UserError: no source of the config plays episodes, or `out` cannot be written.
    """
    context, written = source_context(run), Written()
    sources = {name: make_trace_source(name, config, context) for name, config in run.config.sft.sources.items()}
    players = [source for source in sources.values() if isinstance(source, EpisodeSource)]
    if not players:
        raise UserError(
            f"none of config.sft.sources ({', '.join(sources) or 'empty'}) plays episodes; name one that does."
        )

    def rows() -> Iterator[dict[str, Any]]:
        for source in players:
            for task, episode in source.play():
                if _is_enough(episode.reward, min_reward, written):
                    yield from episode_rows(episode, task, run.model.chat, source.system_prompt)

    _write(out, rows(), written)
    return written


def write_recorded_traces(run: Run, names: Sequence[str], out: str, min_reward: float | None = None) -> Written:
    """Writes the recorded episodes of a run (RUN/episodes/NAME.jsonl) to `out`, one conversation a line.

    Raises:
      UserError: there are no such records, they are of an older version, or `out` cannot be written.
    """
    written = Written()

    def rows() -> Iterator[dict[str, Any]]:
        for name in names:
            path = run.path / "episodes" / f"{name}.jsonl"
            records = read_episodes(path)
            if not records:
                raise UserError(f"{path} holds no recorded episodes; name some of {_recorded(run.path)}.")
            for record in records:
                if not record.tools:
                    raise UserError(
                        f"{path} was recorded by an older version, without the tools of tasks; record it anew."
                    )
                if not _is_enough(record.reward, min_reward, written):
                    continue
                try:
                    made = record_rows(record, run.config.agent.system_prompt)
                except ValueError:
                    written.malformed += 1
                    written.episodes -= 1
                    continue
                yield from made

    _write(out, rows(), written)
    return written


def _is_enough(reward: float | None, least: float | None, written: Written) -> bool:
    """Whether an episode is written; counts it."""
    if least is not None and (reward is None or reward < least):
        written.below_min_reward += 1
        return False
    written.episodes += 1
    return True


def _write(out: str, rows: Iterable[dict[str, Any]], written: Written) -> None:
    """Writes the file when all rows are made. Raises a UserError if there are none or it cannot be written."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
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


def _recorded(path: Path) -> str:
    return ", ".join(sorted(file.stem for file in (path / "episodes").glob("*.jsonl"))) or "none"
