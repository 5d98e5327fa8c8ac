"""launch.traces: the experts of a config and the recorded episodes of a run as files of conversations."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from composer_jax.agent.episode import run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_record import build_episode_record
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.checkpoint.huggingface import save_hf
from composer_jax.demo.repository_bugs import RepositoryBugs, ScriptedSession, expert_turns
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.observe.episodes import write_episodes
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.seeds import seeded_random
from composer_jax.stages.run import Run
from composer_jax.stages.sft import collect_traces
from composer_jax.stages.write_traces import (
    find_tasks,
    write_expert_traces,
    write_recorded_traces,
    write_sampled_traces,
)
from configs import base
from configs.tiny import get_config
from launch import flags, traces
from tests.stages.base_model import NETWORK, write_base
from tests.stages.test_base import config_with


def test_the_traces_of_experts_are_read_back_as_they_are(tmp_path, capsys):
    config = get_config("smoke")
    config.sft.sources = {"experts": config.sft.sources.conversations}
    config.sft.sources.experts.options.traces = {"bugfix": 4, "chain": 8}
    config.agent.limits.update({"max_turns": 10, "max_turn_tokens": 64})
    out = tmp_path / "traces.jsonl"
    with Run(config, tmp_path / "run") as run:
        written = write_expert_traces(run, str(out))
        want, _ = collect_traces(run)
        assert (written.episodes, written.conversations) == (12, len(want)) and len(want) > 12
        rewards = [json.loads(line)["reward"] for line in out.read_text().splitlines()]
        assert write_expert_traces(run, str(out), min_reward=0.5).below_min_reward > 0
        assert 0 < len(out.read_text().splitlines()) == sum(reward >= 0.5 for reward in rewards) < len(rewards)
    command = [f"--workdir={tmp_path / 'run'}", f"--out={out}"]
    with pytest.raises(SystemExit) as ended:
        flags.run(traces.main, ["traces", *command], define=traces.define)
    assert ended.value.code == 0 and f"wrote {len(want)} conversations of 12 episodes" in capsys.readouterr().out
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
                context = EpisodeContext(run.model.chat, pool, EpisodeSettings(limits, "Be good."))
                return await run_episode(EpisodeSpec(task, 0, Compaction(None)), session, context)

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
    config.sft.seq_len = 4096
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


@pytest.fixture
def sampling(tmp_path):
    """A run on a base of random weights, with small limits and a task family."""
    folder = write_base(tmp_path / "model")
    config = base.get_config("4096")
    config.base = f"hf:{folder}"
    config.mesh.update({"cpu_devices": 1, "replica": 1})
    config.sampler.update({"slots": 4, "prefill_shapes": ((4, 1024),), "decode_steps": 8})
    config.agent.limits.update({"max_turns": 2, "max_turn_tokens": 8})
    config.tasks.families = {"bugs": "composer_jax.demo.repository_bugs:RepositoryBugs"}
    with Run(config, tmp_path / "run") as run:
        yield run, config


def test_a_policy_samples_conversations_with_its_ids(sampling, tmp_path):
    run, config = sampling
    out = tmp_path / "sampled.jsonl"
    written = write_sampled_traces(run, config.base, ["bugs:2"], 2, str(out))
    assert (written.episodes, written.conversations) == (4, 4)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["task_id"] for row in rows] == [task.id for task in find_tasks(run, ["bugs:2"]) for _ in range(2)]
    sampled = [row["messages"][-1] for row in rows]
    assert len({json.dumps(message) for message in sampled}) > 1, "attempts differ"
    config.sft.sources = {"files": {"kind": "conversations", "options": {"files": str(out)}}}
    with Run(config, tmp_path / "again") as again:
        traces_, _ = collect_traces(again)
    for message, (ids, mask) in zip(sampled, traces_, strict=True):
        last = message.get("token_ids", [])
        assert mask.sum() <= 2 * 8 and ids[mask][mask.sum() - len(last) :].tolist() == last
    assert any("token_ids" in message for message in sampled), "random ids are seldom those of their text"
    own = {task.id for task in find_tasks(run, ["bugs:2"])}
    assert not own & {run.services.tasks.task("bugs", index).id for index in range(50)}, "RL sees other tasks"


@pytest.mark.parametrize(
    ("tasks", "attempts", "sentence"),
    [
        (["bugs"], 1, "'bugs' names no tasks; use a path, or FAMILY:COUNT for a family of tasks.families"),
        (["birds:3"], 1, "'birds:3' names no tasks"),
        (["bugs:1"], 0, "0 attempts at a task sample nothing"),
    ],
)
def test_sampling_without_tasks_is_a_sentence(sampling, tmp_path, tasks, attempts, sentence):
    run, config = sampling
    with pytest.raises(UserError, match=sentence):
        write_sampled_traces(run, config.base, tasks, attempts, str(tmp_path / "x.jsonl"))


def test_weights_of_another_network_do_not_sample(sampling, tmp_path):
    run, _ = sampling
    other = ModelDef(dataclasses.replace(NETWORK, d_model=16))
    save_hf(str(tmp_path / "other"), other, *other.init(0))
    with pytest.raises(UserError, match="config.model.d_model=32 differs from d_model=16 of hf:"):
        write_sampled_traces(run, f"hf:{tmp_path / 'other'}", ["bugs:1"], 1, str(tmp_path / "x.jsonl"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--policy=hf:x"], "--policy samples episodes of --tasks"),
        (["--policy=hf:x", "--tasks=a:1", "--episodes=rl"], "goes without --episodes"),
        (["--tasks=a:1"], "name its weights, e.g. --policy=hf:DIR"),
    ],
)
def test_flags_that_do_not_fit_are_a_sentence(tmp_path, capsys, words, sentence):
    command = ["traces", "--config=tiny:smoke", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'x'}", *words]
    with pytest.raises(SystemExit) as ended:
        flags.run(traces.main, command, define=traces.define)
    assert ended.value.code != 0 and sentence in capsys.readouterr().err
