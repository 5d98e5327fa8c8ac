"""Bugs with the tools of repositories: the tasks, and the expert in every chat format that declares tools."""

import asyncio
import subprocess
import sys

import pytest

from composer_jax.agent.config import AgentConfig
from composer_jax.agent.prompts.system import SYSTEM
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.demo.repository_bugs import (
    FAMILY,
    RepositoryBugs,
    RepositoryBugTraces,
    ScriptedSession,
    TwoRepositoryBugs,
    UnnamedRepositoryBugs,
)
from composer_jax.errors import UserError
from composer_jax.stages.trace_sources import SourceContext
from tests.data.formats import format_of


def test_a_task_is_a_function_of_its_arguments_and_has_repository_tools():
    family = RepositoryBugs()
    task = family.generate("heldout", 3, 5)
    assert task == family.generate("heldout", 3, 5) != family.generate("heldout", 3, 6)
    assert task.family == FAMILY and task.split == "heldout"
    assert task.tools == tuple(f"repository/{name}" for name in ("read_file", "edit_file", "shell", "finish"))


@pytest.mark.parametrize(("family", "bugs"), [(TwoRepositoryBugs(), 2), (UnnamedRepositoryBugs(), 1)])
def test_harder_families_have_two_bugs_or_tests_that_do_not_name_the_function(family, bugs, tmp_path):
    task = family.generate("train", 0, 1)
    assert task.family == family.name == task.id.split("-")[0] and len(task.metadata["bugs"]) == bugs
    assert len(family.generate("unseen", 0, 1).metadata["bugs"]) == 1
    for path, content in task.files.items():
        (tmp_path / path).write_text(content)
    done = subprocess.run([sys.executable, "run_tests.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("FAIL ") and ", want " in done.stdout
    names = {bug["function"] for bug in task.metadata["bugs"]}
    assert any(name in done.stdout for name in names) == (bugs == 2)
    assert ("Two functions" in task.instruction) == (bugs == 2)
    assert "Two functions" not in family.generate("unseen", 0, 1).instruction


@pytest.mark.parametrize("name", ["qwen", "kimi"])
def test_the_expert_solves_training_tasks(name, tmp_path):
    chat = format_of(name)
    agent = AgentConfig(system_prompt=SYSTEM, concurrency=2)
    source = RepositoryBugTraces(SourceContext(7, chat.tokenizer, chat, agent, tmp_path), count=2)
    traces = source.traces()
    assert source.report() == {"expert_reward": {FAMILY: 1.0}} and len(traces) == 2
    for tokens, trained in traces:
        text = chat.tokenizer.decode(tokens.tolist())
        assert SYSTEM in text and "edit_file" in text and "PASS" in text
        spoken = chat.tokenizer.decode(tokens[trained].tolist())
        assert spoken.count("run_tests.py") == 2 and "PASS" not in spoken, "observations are context, not targets"
    again = source.traces()
    assert all((a[0] == b[0]).all() and (a[1] == b[1]).all() for a, b in zip(traces, again, strict=True))


def test_a_script_refuses_summaries():
    chat = format_of("qwen")
    session = ScriptedSession(iter([("I look.", ToolCall("shell", {"command": "ls"}))]), chat, max_model_len=1000)
    sample = asyncio.run(session.sample([1, 2, 3], SamplingParams(max_tokens=500)))
    assert sample.finish_reason == "stop"
    with pytest.raises(UserError, match="writes no summaries"):
        asyncio.run(session.sample([1, 2, 3], SamplingParams(max_tokens=500), branch=1))
