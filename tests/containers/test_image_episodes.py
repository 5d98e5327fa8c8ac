"""Episodes of tasks that need their image: tools read what it holds, commands run in it, and it is graded there."""

import asyncio
import dataclasses
import json
import os
import platform
import shutil
import tempfile
from pathlib import Path

import pytest

from composer_jax.agent.episode import run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from composer_jax.sandbox import SandboxDied
from composer_jax.sandbox.engine import owner
from composer_jax.tasks import LogGrader, Task
from composer_jax.tasks.images import FOLDER_PREFIX, KEPT_WORKSPACES, ImagePools
from composer_jax.tasks.result_cache import ResultCache
from tests.agent.conftest import ScriptedSession

EVAL = """
set -x
cd /workspace
: '>>>>> Start Test Output'
if [ "$(cat kept)" = new ] && ! [ -e doomed ]; then echo 'test kept ... ok'; else echo 'test kept ... FAILED'; fi
[ "$(cat kept)" = new ]
code=$?
: '>>>>> End Test Output'
echo ">>>>> Test Exit Code: $code"
"""
TOKENIZER = Tokenizer.train(["read_file edit_file shell list_dir finish path old new command"] * 20, 300)


@pytest.fixture
def task(engine):
    grader = LogGrader(EVAL, "parse_log_cargo", ("kept",), (), timeout_s=20)
    more = {"image": engine.image, "metadata": {"resources": {"memory_mb": 64}}}
    return Task("t", "swe_bench", "heldout", "Do it.", {}, ("repository/*",), grader, **more)


def play(task, engine, *messages):
    """The episode in which the model makes these calls, and what each was answered."""

    async def go():
        session = ScriptedSession([CompactFormat(TOKENIZER).render_assistant("", [call]) for call in messages])
        settings = EpisodeSettings(EpisodeLimits(max_turns=20, max_turn_tokens=1000, max_episode_tokens=20_000))
        async with ImagePools(size=2, engine=engine) as images:
            context = EpisodeContext(CompactFormat(TOKENIZER), None, settings, images=images)
            return await run_episode(EpisodeSpec(task, 0, Compaction(None)), session, context)

    episode = asyncio.run(go())
    return episode, [TOKENIZER.decode(n.tokens.tolist()) for n in episode.transcript.nodes if n.kind == "tool"]


def test_an_image_is_read_edited_and_run_in_and_graded(engine, task):
    call = lambda name, **arguments: ToolCall(name, arguments)  # noqa: E731
    episode, answers = play(
        task,
        engine,
        call("list_dir"),
        call("read_file", path="old/one"),
        call("shell", command="cd old && X=5 && ls"),
        call("edit_file", path="kept", old="old", new="new"),
        call("shell", command="echo $X; pwd; cat ../kept; rm ../doomed; ls ../.git"),
        call("read_file", path="doomed"),
        call("finish"),
    )
    assert (episode.outcome, episode.reward, episode.parts) == ("finished", 1.0, {"f2p": 1.0, "p2p": 1.0}), answers
    listed, read, ran, edited, again, gone = answers
    assert "doomed" in listed and "kept" in listed and ".git" not in listed
    assert "old" in read and "one\ntwo" in ran and "ERROR" not in edited
    assert "5\n" in again and "/workspace/old" in again and "new" in again and "No such file" in again
    assert gone.count("ERROR") == 1 and "doomed" in gone


def test_what_lies_on_the_image_is_read_and_what_is_left_alone_is_worth_nothing(engine, task, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "one").write_text("of the task\n")
    task = dataclasses.replace(task, repository=tmp_path)
    read = ToolCall("read_file", {"path": "old/one"})
    episode, answers = play(
        task, engine, read, ToolCall("shell", {"command": "cat old/one old/two"}), ToolCall("finish", {})
    )
    assert "of the task" in answers[0] and "of the task\nold" in answers[1]
    assert (episode.outcome, episode.reward) == ("finished", 0.0) and episode.flags == []


def test_episodes_of_one_task_share_a_place_and_places_are_given_up(engine, task):
    async def go():
        async with ImagePools(size=2, engine=engine) as images:
            async with images.workspace(task) as one, images.workspace(task) as two:
                assert one is two and (one.base / "kept").read_text() == "old\n"
            first = one.base
            for number in range(KEPT_WORKSPACES):
                async with images.workspace(dataclasses.replace(task, id=str(number))) as place:
                    assert place.base != first
            assert not first.exists() and place.base.exists()
            async with images.workspace(task) as again:
                assert (again.base / "kept").exists()
        assert not os.path.lexists(again.base)
        with pytest.raises(UserError, match="has no image no/such:image"):
            async with (
                ImagePools(engine=engine) as images,
                images.workspace(dataclasses.replace(task, image="no/such:image")),
            ):
                raise AssertionError

    asyncio.run(go())


def test_an_image_in_which_nothing_starts_is_a_failure_of_the_infrastructure(engine, task, monkeypatch):
    async def died(*_, **__):
        raise SandboxDied("no container could be started")

    monkeypatch.setattr("composer_jax.sandbox.container.Container.start", died)
    episode, _ = play(task, engine)
    assert (episode.outcome, episode.reward, episode.detail) == (
        "infrastructure",
        None,
        "no container could be started",
    )
    assert json.dumps(episode.to_frame()[0])


def test_pools_that_are_closed_while_places_are_made_leave_nothing(engine, task):
    async def go(delay):
        images = ImagePools(size=2, engine=engine)
        waiting = [asyncio.ensure_future(_in(images, dataclasses.replace(task, id=str(n)))) for n in range(4)]
        await asyncio.sleep(delay)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        async with asyncio.timeout(30):
            await images.close()

    for delay in (0, 0.05, 0.2, 0.5):
        asyncio.run(go(delay))
    left = engine.call("ps", "--all", "--filter", f"ancestor={engine.image}", "--format", "{{.Names}}").stdout
    assert left == "" and not list(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}{owner()}-*"))


async def _in(images, task):
    async with images.workspace(task):
        await asyncio.sleep(60)


def test_folders_of_who_crashed_are_removed(engine, task):
    gone = Path(tempfile.gettempdir(), f"{FOLDER_PREFIX}{platform.node()}:1:0-abc")
    other = Path(tempfile.gettempdir(), f"{FOLDER_PREFIX}elsewhere:1:0-abc")
    for folder in (gone, other):
        (folder / "files").mkdir(parents=True)

    async def go():
        async with ImagePools(engine=engine) as images, images.workspace(task):
            return gone.exists(), other.exists()

    try:
        assert asyncio.run(go()) == (False, True)
    finally:
        shutil.rmtree(other)


def test_the_workspace_of_an_image_goes_by_the_image_s_name_for_it(engine, task):
    call = lambda name, **arguments: ToolCall(name, arguments)  # noqa: E731
    root = engine.working_folder(engine.image) or "/workspace"
    _, answers = play(
        task, engine, call("read_file", path=f"{root}/kept"), call("read_file", path="/testbed/kept"), call("finish")
    )
    assert "old" in answers[0] and f"outside of the workspace; paths are relative to it, or below {root}" in answers[1]


def test_what_a_command_did_outside_of_the_workspace_happens_in_every_episode(engine, task):
    async def go():
        cache, seen = ResultCache(), []
        async with ImagePools(size=2, engine=engine) as images, images.workspace(task) as place:
            for _ in range(2):
                workspace = Workspace(task, place.pool, cache.of_episode(task.id, 0), base=place.base)
                await workspace.run(["sh", "-c", "echo x > /tmp/mark"], 5)
                seen.append((await workspace.shell("cat /tmp/mark", 5))[0].stdout)
                await workspace.close()
        return seen

    assert asyncio.run(go()) == ["x\n", "x\n"]
