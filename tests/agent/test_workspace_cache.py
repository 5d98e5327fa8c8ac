"""Which commands of a workspace are cached, and for whom."""

import pytest

from composer_jax.agent.workspace import Workspace
from composer_jax.tasks.result_cache import ResultCache
from tests.agent.conftest import task_of

SHOW = "import pathlib; print(*sorted(f'{p}={p.read_text()}' for p in pathlib.Path('.').glob('*.txt')), sep=',')"
FILES = {"show.py": SHOW, "a.txt": "1"}
SHOW_THEM = ["python", "show.py"]


async def test_a_command_on_the_same_files_runs_once(dying_pool):
    pool, cache = dying_pool(set()), ResultCache()
    outputs = []
    for text in (b"1", b"1", b"2"):
        workspace = Workspace(task_of(FILES), pool, cache.of_episode("t", 0))
        workspace.write("a.txt", text)
        outputs.append((await workspace.run(SHOW_THEM, 5)).stdout)
        await workspace.close()
    assert outputs == ["a.txt=1\n", "a.txt=1\n", "a.txt=2\n"]
    assert (cache.hits, cache.runs, len(pool.sandboxes)) == (1, 2, 2)


DRAW = ["python", "-c", "import random; print(random.random())"]


async def test_episodes_do_not_share_the_draws_of_a_flaky_test(pool):
    cache, outputs = ResultCache(), []
    for seed in (0, 1, 2, 0, 1, 2):
        workspace = Workspace(task_of(FILES), pool, cache.of_episode("t", seed))
        outputs.append({(await workspace.run(DRAW, 5)).stdout for _ in range(2)})
        await workspace.close()
    assert {len(each) for each in outputs} == {1}, "a repeat in one episode is not drawn again"
    assert len(set.union(*outputs)) == 3 and outputs[:3] == outputs[3:]
    assert (cache.runs, cache.hits) == (3, 9)


COUNT = """
import os
open("{path}", "a").write("x")
print(os.path.getsize("{path}"))
"""


@pytest.mark.parametrize("path", ["/tmp/count", "/dev/shm/count"])
async def test_a_command_that_left_files_elsewhere_is_not_cached(pool, path):
    cache = ResultCache()
    workspace = Workspace(task_of(FILES), pool, cache.of_episode("t", 0))
    assert (await workspace.run(SHOW_THEM, 5)).stdout == "a.txt=1\n"
    counts = [(await workspace.run(["python", "-c", COUNT.format(path=path)], 5)).stdout for _ in range(3)]
    assert counts == ["1\n", "2\n", "3\n"] and (cache.runs, cache.hits) == (2, 0)
    await workspace.run(SHOW_THEM, 5)
    assert (cache.runs, cache.hits) == (2, 0), "a command may read what another one left"
    await workspace.run(["rm", path], 5)
    await workspace.run(SHOW_THEM, 5)
    assert (cache.runs, cache.hits) == (2, 1)
    await workspace.close()


async def test_a_command_that_changes_something_is_not_cached(pool):
    cache = ResultCache()
    for _ in range(2):
        workspace = Workspace(task_of({"make.py": "open('made.txt', 'w').write('x')"}), pool, cache.of_episode("t", 0))
        await workspace.run(["python", "make.py"], 5)
        assert "made.txt" in workspace.files
        await workspace.close()
    assert (cache.hits, cache.runs) == (0, 2)


async def test_results_belong_to_repository_packages_images_and_changes(pool, tmp_path_factory):
    folder, other = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("other")
    (folder / "d").mkdir()
    (folder / "run.sh").write_text("echo run")
    (folder / "run.sh").chmod(0o755)
    cache = ResultCache()
    for options in ({}, {"repository": folder}, {"repository": folder, "packages": other}, {"repository": folder}):
        workspace = Workspace(task_of({}, **options), pool, cache.of_episode("t", 0))
        await workspace.run(["ls"], 5)
        await workspace.close()
    assert (cache.runs, cache.hits) == (3, 1)
    for image in ("a:1", "a:2", "a:1"):
        workspace = Workspace(task_of({}, repository=folder, image=image), pool, cache.of_episode("t", 0))
        await workspace.run(["ls"], 5)
        await workspace.close()
    assert (cache.runs, cache.hits) == (5, 2)
    workspace = Workspace(task_of({}, repository=folder), pool, cache.of_episode("t", 0))
    workspace.write("run.sh", b"echo run", 0o644)
    await workspace.run(["ls"], 5)
    assert (cache.runs, cache.hits) == (6, 2), "permissions count"
    await workspace.shell("cd d; echo x > /tmp/y", 5)
    await workspace.run(["ls"], 5)
    assert (cache.runs, cache.hits) == (6, 2), "what a shell left elsewhere may matter"
    await workspace.close()
