"""Grading by a script: its reward file is the reward, and a malformed one is 0."""

import asyncio

import pytest

from composer_jax.sandbox import SandboxDied
from composer_jax.tasks import ScriptGrader, Task
from composer_jax.tasks.grading import grade, initial_changes
from composer_jax.tasks.grading.script import read_reward
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.retry import ATTEMPTS

JSON, TXT = "/logs/verifier/reward.json", "/logs/verifier/reward.txt"


@pytest.fixture
def make_task(tmp_path):
    def make_task(script, timeout_s=10.0, **environment):
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "tests" / "test.sh").write_text(script)
        grader = ScriptGrader(tmp_path / "tests", timeout_s, environment)
        return Task("t", "harbor", "heldout", "Do it.", {"a.txt": "a"}, ("finish",), grader)

    return make_task


def graded(task, pool, changes=(), cache=None):
    return asyncio.run(grade(task, dict(changes), pool, cache and cache.of_episode(task.id, 0)))


@pytest.mark.parametrize(
    ("script", "reward", "detail"),
    [
        (f"echo 0.5 > {TXT}", 0.5, "test.sh says 0.5"),
        (f"echo 1 > {TXT}; exit 3", 1.0, "test.sh says 1.0"),
        (f"echo 0.25 > {JSON}; echo 1 > {TXT}", 0.25, "test.sh says 0.25"),
        (f'echo \'{{"reward": 1, "speed": 3.5, "note": "x"}}\' > {JSON}', 1.0, "test.sh says 1.0"),
        (f"echo '{{\"accuracy\": 0.75}}' > {JSON}", 0.75, "test.sh says 0.75"),
        (f'echo \'{{"a": 1, "b": 1}}\' > {JSON}', 0.0, "has the metrics 'a', 'b' and none of them is 'reward'"),
        (f"echo $A > {TXT}", 0.75, "test.sh says 0.75"),
        ("echo first; echo last words >&2; exit 2", 0.0, "left no reward; its exit code is 2, its last words: last"),
        ("exit 0", 0.0, "left no reward; its exit code is 0, its last words: nothing"),
        (f"echo nan > {TXT}", 0.0, "reward.txt holds no reward: 'nan'"),
        (f"echo 1 1 > {TXT}", 0.0, "reward.txt holds no reward: '1 1'"),
        (f"echo NaN > {JSON}; echo 1 > {TXT}", 0.0, "reward.json holds no reward: 'NaN'"),
        (f"echo 100 > {TXT}", 0.0, "holds the reward 100.0, which is not from 0 to 1 and counts as 0"),
        (f"mkdir {JSON}", 0.0, "reward.json cannot be read"),
        (f"head -c 300000 /dev/zero > {TXT}", 0.0, "holds no reward"),
    ],
)
def test_the_reward_file_is_the_reward(make_task, pool, script, reward, detail):
    result = graded(make_task(script, A="0.75"), pool)
    assert result.reward == reward and detail in result.detail


def test_other_numbers_are_parts(make_task, pool):
    result = graded(make_task(f'echo \'{{"reward": 0, "a": 1, "b": true, "c": null, "d": 0.5}}\' > {JSON}'), pool)
    assert result.parts == {"a": 1.0, "d": 0.5}


@pytest.mark.parametrize(
    "text",
    ["", "null", "true", '"1"', "[1]", "{}", '{"reward": true}', '{"a": null}', '{"a": "1"}', "[" * 99999, "9" * 5000],
)
def test_malformed_json_is_not_a_reward(text):
    assert read_reward(text, "reward.json").reward == 0.0


@pytest.mark.parametrize("text", ["", "inf", "-inf", "1e999", "0x1", "one", "-0.1", "1.0001"])
def test_text_and_numbers_out_of_range_are_not_a_reward(text):
    assert read_reward(text, "reward.txt").reward == 0.0


def test_a_script_that_does_not_end_gives_nothing_and_is_not_cached(make_task, pool):
    cache = ResultCache()
    task = make_task(f"echo 1 > {TXT}; sleep 100", timeout_s=0.5)
    for _ in range(2):
        assert "did not come to its end: timeout" in graded(task, pool, cache=cache).detail
    assert (cache.hits, cache.runs) == (0, 2)


def test_the_same_submission_is_graded_once(make_task, pool):
    cache = ResultCache()
    task = make_task(f"echo 1 > {TXT}")
    assert graded(task, pool, cache=cache) == graded(task, pool, cache=cache)
    assert (cache.hits, cache.runs) == (1, 1)


def test_dying_sandboxes_are_replaced_and_an_outage_gives_no_reward(make_task, dying_pool):
    task = make_task(f"echo 1 > {TXT}")
    assert graded(task, dying_pool(range(ATTEMPTS - 1))).reward == 1.0
    outage = dying_pool(range(99))
    with pytest.raises(SandboxDied):
        graded(task, outage)
    assert len(outage.sandboxes) == ATTEMPTS


def test_a_file_of_the_task_that_was_deleted_stays_deleted(make_task, pool):
    task = make_task(f"if [ -e a.txt ]; then echo 0 > {TXT}; else echo 1 > {TXT}; fi")
    assert graded(task, pool, initial_changes(task)).reward == 0.0
    assert graded(task, pool, {}).reward == 1.0
