"""State tracking: distances against a dynamic program, tasks of real repositories, and writers whose score is known."""

import asyncio
import random

import pytest

from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from composer_jax.evals.state_tracking import (
    edit_distance,
    encode_tasks,
    make_task,
    read_tasks,
    run_tasks,
    summarise,
)
from composer_jax.tasks.patches import parse_unified
from tests.data.prepare.folders import code, commit, git, make_repository, write_files
from tests.rl.scripted_policy import ScriptedPolicy

TOKENIZER = Tokenizer.train([code(seed) for seed in range(5)], 400)
LINES = ["    x += 1  # größer\n", "    x *= 2\n", "    print(x)\n"]
VERSIONS = [f"def f(x):\n{''.join(LINES[:k])}    return x\n" for k in range(4)]


def levenshtein(a: str, b: str) -> int:
    """Wagner and Fischer's dynamic program."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def test_distances_are_those_of_the_dynamic_program():
    rng = random.Random(0)
    for _ in range(200):
        a, b = ("".join(rng.choices("abc\né\U0001f600", k=rng.randrange(30))) for _ in range(2))
        assert edit_distance(a, b) == levenshtein(a, b)
    assert edit_distance(VERSIONS[0], VERSIONS[3]) == levenshtein(VERSIONS[0], VERSIONS[3])


def blocks(prompt: str, fence: str) -> list[str]:
    """The contents of the fenced blocks of a prompt; the last is open."""
    parts = f"\n{prompt}".split(f"\n{fence}")
    return [part.partition("\n")[2] + "\n" for part in parts[1::2]]


def apply(text: str, diff: str) -> str:
    (patch,) = parse_unified(diff)
    lines = text.splitlines(keepends=True)
    for hunk in reversed(patch.hunks):
        start, end = hunk.old_range
        assert tuple(lines[start:end]) == hunk.old
        lines[start:end] = hunk.new
    return "".join(lines)


@pytest.mark.parametrize("versions", [VERSIONS, ["a\n", "```\nb\n````x\n", "```\nc\n"], ["a\n\n\n", "\nb\n\n"]])
def test_the_prompt_determines_the_last_version(versions):
    task = make_task("m.py", versions)
    first, *diffs, rest = blocks(task.prompt, task.fence)
    assert first == versions[0] and rest == "\n" and task.prompt.endswith(f"m.py after all changes:\n\n{task.fence}\n")
    text = first
    for diff, version in zip(diffs, versions[1:], strict=True):
        text = apply(text, diff)
        assert text == version
    assert text == task.last and task.fence not in "".join(versions)


def test_an_answer_ends_at_the_fence():
    task = make_task("m.py", VERSIONS)
    for written, answer in (
        ("a\nb\n```\nmore", "a\nb\n"),
        ("a\n\n```", "a\n\n"),
        ("```\n", ""),
        ("a\nb", "a\nb"),
        ("a ``` b\n", "a ``` b\n"),
        ("", ""),
    ):
        assert task.read_answer(written) == answer


def changed(*texts: str | bytes) -> list[tuple[str, dict]]:
    return [(str(number), {"m.py": text}) for number, text in enumerate(texts)]


def test_the_newest_changes_of_a_file_make_a_task(tmp_path):
    folder = make_repository(tmp_path / "r", *changed(code(0), *VERSIONS))
    git(folder, "checkout", "--quiet", "-b", "side")
    write_files(folder, {"m.py": "side = 1\n" + VERSIONS[3]})
    git(folder, "commit", "--quiet", "--all", "--message", "side")
    git(folder, "checkout", "--quiet", "-")
    write_files(folder, {"other.py": "x = 1\n"})
    git(folder, "add", "--all")
    commit(folder, "main")
    git(folder, "merge", "--quiet", "--no-edit", "side")  # the merge is a change of m.py like any other
    write_files(folder, {"m.py": "not committed\n"})
    (task,) = read_tasks(folder, 4)
    assert task == make_task("m.py", [*VERSIONS, "side = 1\n" + VERSIONS[3]])


def test_what_is_not_a_change_does_not_count(tmp_path):
    crlf = VERSIONS[1].replace("\n", "\r\n").encode()
    folder = make_repository(
        tmp_path / "r", *changed(VERSIONS[0], VERSIONS[1], crlf, VERSIONS[1].rstrip(), VERSIONS[2])
    )
    (folder / "m.py").chmod(0o755)
    git(folder, "commit", "--quiet", "--all", "--message", "mode")
    (task,) = read_tasks(folder, 2)
    assert task == make_task("m.py", VERSIONS[:3])
    assert list(read_tasks(folder, 3)) == ["too few changes"]


def test_a_history_begins_where_the_file_was_added_last(tmp_path):
    folder = make_repository(tmp_path / "r", *changed(*VERSIONS[:3]))
    git(folder, "rm", "--quiet", "m.py")
    commit(folder, "deleted")
    (folder / "m.py").write_text(VERSIONS[3])
    git(folder, "add", "--all")
    commit(folder, "added")
    write_files(folder, {"m.py": VERSIONS[0]})
    git(folder, "commit", "--quiet", "--all", "--message", "changed")
    (task,) = read_tasks(folder, 1)
    assert (task.first, task.last) == (VERSIONS[3], VERSIONS[0])
    with pytest.raises(UserError, match="2 changes, the most is 1"):
        list(read_tasks(folder, 2))


def test_files_that_make_no_task_are_counted(tmp_path):
    files = [{"good.py": VERSIONS[k], "bad.py": f"x = '{k}ä'\n".encode("latin-1"), "l.py": code(k)} for k in range(2)]
    files[1]["bad.py"] = b"x = 1\n"  # an old version counts, too
    vendored = [{"node_modules/a.js": f"let x = {k}\n", "data.json": f"{k}\n"} for k in range(2)]
    folder = make_repository(tmp_path / "r", *(("c", one | two) for one, two in zip(files, vendored, strict=True)))
    encoded, skipped = encode_tasks(read_tasks(folder, 1), TOKENIZER, 9, 500)
    assert [one.task.path for one in encoded] == ["good.py"]
    assert skipped == {"wrong encoding": 1, "too long": 1}
    needed = len(encoded[0].prompt) + encoded[0].max_tokens
    assert len(encode_tasks([encoded[0].task], TOKENIZER, 9, needed)[0]) == 1
    with pytest.raises(UserError, match=rf"{needed - 1} tokens \(2 too long, 1"):
        encode_tasks(read_tasks(folder, 1), TOKENIZER, 9, needed - 1)
    assert len(encode_tasks([encoded[0].task] * 5, TOKENIZER, 3, 500)[0]) == 3


@pytest.mark.parametrize("name", ["none", "plain"])
def test_a_folder_without_git_is_refused(tmp_path, name):
    write_files(tmp_path / "plain", {"a.py": "x\n"})
    with pytest.raises(UserError, match=f"{name} is not a git"):
        list(read_tasks(tmp_path / name, 1))


def play(tasks, writer):
    """Results of a policy that writes writer(task)."""
    messages = [TOKENIZER.encode(writer(one.task)) for one in tasks]
    sessions = iter([[message] for message in messages])
    done = []
    results = asyncio.run(
        run_tasks(tasks, ScriptedPolicy(lambda _: next(sessions)), TOKENIZER.decode, lambda: done.append(1))
    )
    assert len(done) == len(tasks)
    return results


def test_writers_whose_score_is_known():
    tasks = [make_task(f"m{k}.py", VERSIONS[k:]) for k in range(3)]
    encoded, _ = encode_tasks(tasks, TOKENIZER, 9, 4096)
    perfect = summarise(play(encoded, lambda task: f"{task.last}{task.fence}\n"))
    assert (perfect["exact"], perfect["distance"], perfect["normalised_distance"]) == (1, 0, 0)
    assert perfect["better_than_copy"] == 1 and perfect["cut"] == 0

    results = play(encoded, lambda task: task.first + task.fence)
    for result, task in zip(results, tasks, strict=True):
        expected = levenshtein(task.first, task.last)
        assert (result.path, result.distance, result.copy_distance) == (task.path, expected, expected)
        assert result.normalised == result.copy_normalised == expected / max(len(task.first), len(task.last))
    copying = summarise(results)
    assert copying["normalised_distance"] == copying["copy_normalised_distance"] > 0
    assert (copying["exact"], copying["better_than_copy"]) == (0, 0)

    nothing = summarise(play(encoded, lambda task: task.fence))
    assert nothing["normalised_distance"] == 1 and nothing["distance"] == sum(len(t.last) for t in tasks) / 3

    endless = play(encoded, lambda task: task.last * 10)
    for result, one in zip(endless, encoded, strict=True):
        assert result.finish_reason == "length" and result.sampled_tokens == one.max_tokens
        assert result.distance == len(result.written) - len(one.task.last) > 0
        assert 0 < result.normalised < 1
