"""The scripts of examples/ run and print what their docstrings say."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from composer_jax.agent.prompts.system import SYSTEM
from composer_jax.checkpoint.huggingface import save_hf
from composer_jax.data.chat.tool_prompt import SHORT_TOOL_PROMPT
from composer_jax.models.model_def import ModelDef
from composer_jax.models.presets import PRESETS
from composer_jax.observe.episodes import read_episodes as read_recorded
from composer_jax.observe.episodes import write_episodes
from composer_jax.observe.metrics import read_metrics
from composer_jax.schema.run_config import run_config
from composer_jax.tasks.harbor import read_task
from examples import add_tool, own_repository, read_episodes, rl_loop, sample_weights, task_family
from launch import flags
from tests.data.model_folders import CHATML, CHATML_TOKENS, tokenizer_json, write_folder
from tests.stages import smoke_config
from tests.stages.command_line import finish, start

ROOT = Path(__file__).parents[2]

EPISODE = {
    "task_id": "t0",
    "family": "bugfix",
    "split": "train",
    "seed": 7,
    "reward": 0.0,
    "outcome": "no_call",
    "turns": 1,
    "summaries": 0,
    "condition": "default",
    "step": None,
    "tokens": 5,
    "sampled_tokens": 3,
    "summary_tokens": 0,
    "parts": {"detail": "0 of 2 hidden cases pass"},
    "instruction": "Fix it.",
    "segments": [
        [
            {"kind": "prompt", "text": "Fix it.", "tokens": 2, "sampled": False, "version": None, "calls": []},
            {
                "kind": "assistant",
                "text": "",
                "tokens": 3,
                "sampled": True,
                "version": 0,
                "calls": [{"name": "read", "arguments": {"path": "a.py"}, "error": None}],
            },
        ]
    ],
}


def test_read_episodes(tmp_path, capsys):
    path = write_episodes(tmp_path / "after.jsonl", [EPISODE, EPISODE | {"reward": 1.0, "outcome": "finished"}])
    read_episodes.main(str(path))
    shown = capsys.readouterr().out
    assert "bugfix: 1 of 2 solved; 1 no_call, 1 finished; 0.0 summaries each" in shown
    assert "t0, seed 7: 0 of 2 hidden cases pass" in shown
    assert "[assistant, 3 tokens]  read({'path': 'a.py'})" in shown


def test_sample_weights_is_fixed_by_the_seed(tmp_path):
    sample_weights.write_small_model(tmp_path / "model")
    first, again = (sample_weights.answer(tmp_path / "model", "Add.", 12, 0) for _ in range(2))
    assert first and first == again
    assert sample_weights.answer(tmp_path / "model", "Add.", 12, 1) != first


def test_add_tool(capsys):
    episode = asyncio.run(add_tool.play())
    assert episode.reward == 1.0
    assert capsys.readouterr().out.splitlines() == ["3 lines", "ok", "finished, reward 1.0"]


def test_task_family():
    family = task_family.Offset()
    assert family.generate("train", 0, 1) == family.generate("train", 0, 1) != family.generate("train", 0, 2)
    assert asyncio.run(task_family.grades(family.generate("heldout", 3, 5))) == (0.0, 1.0)
    config = run_config(task_family.get_config())
    assert config.rl.groups == {"offset": 2} and config.evaluate.suites["offset"].family == "offset"


def test_rl_loop(capsys):
    rewards = rl_loop.main(2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines] == [f"step {i}: reward {r:.3f}" for i, r in enumerate(rewards, 1)]
    assert all(0 < reward < 1 for reward in rewards) and "loss nan" not in lines[1]


@pytest.mark.slow
def test_rl_loop_raises_the_reward():
    rewards = rl_loop.main()
    assert len(rewards) == rl_loop.STEPS and rewards[-1] > 2 * rewards[0]


@pytest.fixture(scope="module")
def made_tasks(tmp_path_factory, packages):
    """The folder of two tasks of a small repository."""
    folder = tmp_path_factory.mktemp("own")
    return own_repository.make_tasks(own_repository.make_repository(folder / "shop"), folder / "tasks", packages)


def test_own_repository_makes_tasks(made_tasks):
    tasks = [read_task(folder) for folder in (made_tasks / "tasks").iterdir()]
    assert len(tasks) == own_repository.STEPS and {task.family for task in tasks} == {"repository"}
    assert run_config(own_repository.get_config(made_tasks)).rl.groups == {"repository": 1}


@pytest.mark.slow
def test_own_repository_trains(tmp_path, packages, monkeypatch, capsys):
    monkeypatch.setattr(own_repository, "tiny", smoke_config)
    own_repository.main("", str(tmp_path), str(packages))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 tasks from ") and lines[-1].startswith("step 2: reward ")


@pytest.fixture(scope="module")
def small_smollm2(tmp_path_factory):
    """The folder of a model of SmolLM2's family, with a chat template that knows no tools, as its own."""
    sizes = dict(vocab_size=512, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, dense_ff_dim=32)
    network = ModelDef(dataclasses.replace(PRESETS["smollm2_135m"], **sizes, qk_rope_dim=8, v_head_dim=8))
    folder = tmp_path_factory.mktemp("published")
    save_hf(str(folder), network, *network.init(0))
    tokenizer = tokenizer_json(CHATML_TOKENS, [SYSTEM, SHORT_TOOL_PROMPT], vocab_size=480)
    return write_folder(folder, tokenizer, CHATML), network.config


def rl_smollm2_flags(base: Path, tasks: Path) -> tuple[str, ...]:
    return "--config=examples/rl_smollm2.py", f"--config.base=hf:{base}", f"--config.tasks.train={tasks}"


def test_rl_smollm2_takes_network_and_tasks_from_the_command_line(small_smollm2, made_tasks, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    base, network = small_smollm2
    config, _ = flags.parse(["launch.rl", f"--workdir={tmp_path}", *rl_smollm2_flags(base, made_tasks)])
    run = run_config(config)
    assert run.model == dataclasses.replace(network, compute_dtype="float32", head_chunk=512)
    assert run.stages == ("rl",) and run.tasks.train == str(made_tasks) and run.rl.groups["repository"] == 2


@pytest.mark.slow
def test_rl_smollm2_trains_on_the_tasks_of_the_folder(small_smollm2, made_tasks, tmp_path):
    run, cache = tmp_path / "run", tmp_path / "cache"
    small = ("--config.rl.steps=1", "--config.rl.group_size=2", "--config.agent.limits.max_turn_tokens=16")
    arguments = (*rl_smollm2_flags(small_smollm2[0], made_tasks), *small)
    process = finish(start(run, *arguments, cache=cache, entry="launch.rl"))
    assert process.returncode == 0, process.stderr
    (row,) = read_metrics(run / "metrics" / "rl.jsonl")
    assert row["reward_repository"] == 0 and row["tokens"] > 0
    recorded = next(iter(read_recorded(run / "episodes" / "rl.jsonl")))
    assert recorded.task_id in {folder.name for folder in (made_tasks / "tasks").iterdir()}
    prompt = "".join(message.text for message in recorded.segments[0])
    assert SYSTEM in prompt and "read_file(path: string" in prompt
