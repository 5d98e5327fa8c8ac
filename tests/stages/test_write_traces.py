"""launch.traces: the experts of a config and the recorded episodes of a run as files of conversations."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from composer_jax.agent.episode import EpisodeLimits, run_episode
from composer_jax.agent.episode_record import build_episode_record
from composer_jax.agent.summary import Compaction
from composer_jax.demo.repository_bugs import RepositoryBugs, ScriptedSession, expert_turns
from composer_jax.errors import UserError
from composer_jax.observe.episodes import write_episodes
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.seeds import seeded_random
from composer_jax.stages.run import Run
from composer_jax.stages.sft import collect_traces
from composer_jax.stages.write_traces import write_expert_traces, write_recorded_traces
from configs.tiny import get_config
from launch import flags, traces
from tests.stages.base_model import write_base
from tests.stages.test_base import config_with


def test_the_traces_of_experts_are_read_back_as_they_are(tmp_path, capsys):
    config = get_config("smoke")
    config.sft.sources = {"experts": config.sft.sources.conversations}
    config.sft.sources.experts.options.traces = {"bugfix": 8, "recall_short": 2}
    config.agent.limits.update({"max_turns": 10, "max_turn_tokens": 64})
    out = tmp_path / "traces.jsonl"
    with Run(config, tmp_path / "run") as run:
        written = write_expert_traces(run, str(out))
        want, _ = collect_traces(run)
        assert (written.episodes, written.conversations) == (10, len(want)) and len(want) > 10
        rewards = [json.loads(line)["reward"] for line in out.read_text().splitlines()]
        assert write_expert_traces(run, str(out), min_reward=0.5).below_min_reward > 0
        assert 0 < len(out.read_text().splitlines()) == sum(reward >= 0.5 for reward in rewards) < len(rewards)
    command = [f"--workdir={tmp_path / 'run'}", f"--out={out}"]
    with pytest.raises(SystemExit) as ended:
        flags.run(traces.main, ["traces", *command], define=traces.define)
    assert ended.value.code == 0 and f"wrote {len(want)} conversations of 10 episodes" in capsys.readouterr().out
    config.sft.sources = {"files": {"kind": "conversations", "options": {"files": str(out)}}}
    with Run(config, tmp_path / "again") as run:
        got, report = collect_traces(run)
        assert report["conversations"] == {str(out): {"conversations": len(want), "invalid": 0, "too_long": 0}}
        with pytest.raises(UserError, match="none of config.sft.sources \\(files\\) plays episodes"):
            write_expert_traces(run, str(out))
    for (ids, mask), (want_ids, want_mask) in zip(got, want, strict=True):
        np.testing.assert_array_equal(ids, want_ids)
        np.testing.assert_array_equal(mask, want_mask)


@pytest.fixture
def recorded(tmp_path):
    """A run on a base with two recorded episodes of an expert, one of them without reward."""
    config = config_with(write_base(tmp_path / "model"))
    config.agent.system_prompt = "Be good."
    with Run(config, tmp_path / "run") as run:
        task = RepositoryBugs().generate("train", 0, 0)
        limits = EpisodeLimits(max_turns=16, max_turn_tokens=2000, max_episode_tokens=60_000)

        async def play():
            session = ScriptedSession(expert_turns(task, seeded_random("x")), run.model.chat, 1 << 20)
            async with LocalSandboxPool(size=1) as pool:
                return await run_episode(
                    task,
                    session,
                    pool,
                    run.model.chat,
                    compaction=Compaction(None),
                    limits=limits,
                    system_prompt="Be good.",
                )

        episode = asyncio.run(play())
        record = build_episode_record(episode, task, run.model.chat, condition="none")
        assert record.reward == 1.0
        yield run, record, episode


def test_recorded_episodes_with_enough_reward_are_written(recorded, tmp_path):
    run, record, episode = recorded
    write_episodes(run.path / "episodes" / "rl.jsonl", [record, dataclasses.replace(record, reward=0.0), record])
    out = tmp_path / "more" / "traces.jsonl"
    written = write_recorded_traces(run, ["rl"], str(out), min_reward=0.5)
    assert dataclasses.asdict(written) == {"conversations": 2, "episodes": 2, "below_min_reward": 1, "malformed": 0}
    config = config_with(tmp_path / "model")
    config.sft.sources = {"files": {"kind": "conversations", "options": {"files": str(out)}}}
    config.sft.seq_len = 8192
    config.model.max_context = 4096
    with Run(config, tmp_path / "again") as again:
        got, _ = collect_traces(again)
    [want] = episode.transcript.rows()
    for ids, mask in got:
        np.testing.assert_array_equal(ids, want.tokens)
        np.testing.assert_array_equal(mask, want.trained)


def test_what_cannot_be_written_is_a_sentence(recorded, tmp_path):
    run, record, _ = recorded
    with pytest.raises(UserError, match="rl.jsonl holds no recorded episodes; name some of none"):
        write_recorded_traces(run, ["rl"], str(tmp_path / "x.jsonl"))
    write_episodes(run.path / "episodes" / "rl.jsonl", [record])
    with pytest.raises(
        UserError, match="no conversation is left to write .* 1 episodes have less than the least reward"
    ):
        write_recorded_traces(run, ["rl"], str(tmp_path / "x.jsonl"), min_reward=2.0)
    with pytest.raises(UserError, match="cannot be written"):
        write_recorded_traces(run, ["rl"], str(run.path))
    write_episodes(run.path / "episodes" / "old.jsonl", [dataclasses.replace(record, tools=())])
    with pytest.raises(UserError, match="recorded by an older version"):
        write_recorded_traces(run, ["old"], str(tmp_path / "x.jsonl"))
