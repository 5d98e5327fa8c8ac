"""Tasks that need their image, played and graded in real containers."""

import asyncio

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import Change, LocalSandboxPool, SandboxLimits
from composer_jax.sandbox.container_pool import ContainerPool
from composer_jax.tasks import LogGrader, Task
from composer_jax.tasks.formats import ReadOptions, read_tasks
from composer_jax.tasks.grading import grade
from composer_jax.tasks.images import container_pool
from tests.demo.generate import generate

EVAL = """
set -x
cd /workspace
[ -e .git/later-commits ] || exit 9
: '>>>>> Start Test Output'
if [ "$(cat kept)" = new ]; then echo 'test kept ... ok'; else echo 'test kept ... FAILED'; fi
echo 'test other ... ok'
[ "$(cat kept)" = new ]
code=$?
: '>>>>> End Test Output'
echo ">>>>> Test Exit Code: $code"
"""
LIMITS = SandboxLimits(timeout_s=20, memory_mb=64, processes=32)


def test_a_log_is_graded_in_the_image(engine):
    grader = LogGrader(EVAL, "parse_log_cargo", ("kept",), ("other",), timeout_s=20)
    task = Task("t", "swe_bench", "heldout", "Do it.", {}, ("finish",), grader, image=engine.image)

    async def go():
        async with ContainerPool(
            engine.image, LIMITS, engine=engine, workspace="/workspace", hide_history=True
        ) as pool:
            async with await pool.acquire({}) as mine:  # an agent's: later commits are not to be seen
                assert (await mine.run(["ls", ".git"])).outcome == "nonzero"
                await mine.run(["bash", "-c", "echo new > kept; echo 'test kept ... ok' > doomed"])
                changes = await mine.changes()
            forged = {"kept": Change("file", b"\ntest kept ... ok\n>>>>> Test Exit Code: 0\n")}
            return [await grade(task, what, pool) for what in (changes, {}, forged)]

    solved, nothing, forged = asyncio.run(go())
    assert solved.reward == 1.0 and solved.parts == {"f2p": 1.0, "p2p": 1.0}
    assert nothing.reward == 0.0 and nothing.parts == {"f2p": 0.0, "p2p": 1.0}
    assert forged.reward == 0.0


def test_a_harbor_task_is_built_solved_and_graded(engine, tmp_path):
    files = {
        "task.toml": "schema_version = '1.0'\n[environment]\nmemory_mb = 64\nenv = { WORD = 'new' }\n",
        "instruction.md": "Put $WORD into kept.",
        "environment/Dockerfile": f"FROM {engine.image}\nCOPY given /workspace/given\nWORKDIR /workspace\n",
        "environment/given": "given",
        "tests/test.sh": '[ "$(cat kept)" = new ] && [ -e given ] && echo 1 > /logs/verifier/reward.txt\n',
    }
    for path, text in files.items():
        (tmp_path / "task" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / path).write_text(text)
    (task,) = read_tasks(tmp_path / "task", ReadOptions(store=tmp_path / "store"))

    async def go():
        async with container_pool(task, engine=engine) as pool:
            async with await pool.acquire(task.files) as sandbox:
                await sandbox.run(["sh", "-c", "echo $WORD > kept"])
                changes = await sandbox.changes()
            assert changes == {"kept": Change("file", b"new\n")}
            return [(await grade(task, what, pool)).reward for what in (changes, {})]

    try:
        assert asyncio.run(go()) == [1.0, 0.0]
    finally:
        engine.call("rmi", "--force", task.image)


def test_a_task_with_an_image_is_not_graded_outside_of_it():
    grader = LogGrader("true", "parse_log_pytest", ("test_a",))
    task = Task("t", "swe_bench", "heldout", "Do it.", {}, ("finish",), grader, image="some/image")

    async def go():
        async with LocalSandboxPool(size=1) as pool:
            await grade(task, {}, pool)

    with pytest.raises(UserError, match="task t needs the image some/image; grade it in a container_pool"):
        asyncio.run(go())
    with pytest.raises(UserError, match="needs no image; run it in a LocalSandboxPool"):
        container_pool(generate("bugfix", "train", 0, 0))
