"""What is read of git repositories, folders and rows, and which commits become text."""

import json
import os

import pyarrow
import pytest
from pyarrow import parquet

from composer_jax.data.prepare.candidates import is_heldout, read_candidates
from composer_jax.data.prepare.config import PrepareConfig
from composer_jax.data.prepare.git_repository import head_commit, is_repository, read_commits
from composer_jax.data.prepare.plan import read_unit, unit_file, write_units
from composer_jax.errors import UserError
from tests.data.prepare.folders import code, commit, git, make_repository, write_files

KEEP_ALL = PrepareConfig(heldout_fraction=0.0)


def candidates(tmp_path, *sources, config=KEEP_ALL):
    """(path, content or why it is left out) of every candidate, unit by unit."""
    out = tmp_path / "out"
    units = [read_unit(unit_file(out, n)) for n in range(len(write_units([str(s) for s in sources], config, out)))]
    return [[(c.path, c.reason or c.load()) for c in read_candidates(unit, config)] for unit in units]


def test_a_repository_reads_as_committed(tmp_path):
    folder = make_repository(tmp_path / "r", ("first", {"a.py": "x = 1\n", "gone.py": "old\n", "é b.md": "# Z\n"}))
    (folder / "link.py").symlink_to("a.py")
    (folder / "gone.py").unlink()
    git(folder, "add", "--all")
    commit(folder, "second")
    write_files(folder, {"a.py": "changed, not committed\n", "new.py": "not committed\n"})
    expected = [[("a.py", b"x = 1\n"), ("é b.md", b"# Z\n"), ("link.py", "link")]]
    assert candidates(tmp_path, folder) == expected
    git(tmp_path, "clone", "--quiet", "--bare", str(folder), str(tmp_path / "bare"))
    assert is_repository(tmp_path / "bare")
    assert candidates(tmp_path, tmp_path / "bare") == expected
    git(folder, "checkout", "--quiet", "--detach")
    git(folder, "worktree", "add", "--quiet", "--detach", str(tmp_path / "worktree"))
    assert candidates(tmp_path, tmp_path / "worktree") == candidates(tmp_path, folder) == expected


def test_repositories_that_cannot_be_read_are_left_out_and_the_others_are_read(tmp_path):
    many = tmp_path / "many"
    make_repository(many / "empty")
    git(make_repository(many / "head", ("first", {"a.py": "x = 1\n"})), "symbolic-ref", "HEAD", "refs/heads/gone")
    write_files(many, {"worktree/.git": "gitdir: /nowhere\n", "worktree/a.py": "w = 1\n"})
    tree = git(make_repository(many / "tree", ("first", {"a.py": "y = 1\n"})), "rev-parse", "HEAD^{tree}").strip()
    (many / "tree/.git/objects" / tree[:2] / tree[2:]).unlink()
    make_repository(many / "whole", ("first", {"a.py": "z = 1\n"}))
    (unit,) = candidates(tmp_path, many)
    assert sorted(unit, key=str) == [(".", "unreadable repository")] * 4 + [("a.py", b"z = 1\n")]


def test_links_submodules_and_pipes_are_counted(tmp_path):
    inner = make_repository(tmp_path / "inner", ("first", {"b.py": "b = 1\n"}))
    folder = make_repository(tmp_path / "all/r", ("first", {"a.py": "x = 1\n"}))
    git(folder, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "lib")
    (folder / "link").symlink_to("lib")
    git(folder, "add", "--all")
    commit(folder, "second")
    (tmp_path / "all/folder").symlink_to("r")
    (tmp_path / "all/c.py").symlink_to("gone.py")
    os.mkfifo(tmp_path / "all/pipe.py")
    (unit,) = candidates(tmp_path, tmp_path / "all")
    assert [(path, content) for path, content in unit if isinstance(content, str)] == [
        (".gitmodules", "unknown language"), ("lib", "submodule"), ("link", "link"),
        ("c.py", "link"), ("folder", "link"), ("pipe.py", "unreadable"),
    ]  # fmt: skip
    assert [content for _, content in unit if isinstance(content, bytes)] == [b"x = 1\n"]


def test_commits_at_the_edge_of_a_shallow_clone_are_left_out(tmp_path):
    folder = make_repository(
        tmp_path / "r", *((f"Adds {name}", {f"{name}.py": f"{name} = 1\n"}) for name in ("a", "b", "c"))
    )
    edge = "edge of a shallow clone"
    for depth, commits, expected in ((1, 5, [edge]), (2, 5, [b"Adds c", edge]), (2, 1, [b"Adds c"]), (9, 2, None)):
        clone = tmp_path / f"{depth} {commits}"
        git(tmp_path, "clone", "--quiet", "--depth", str(depth), f"file://{folder}", str(clone))
        config = PrepareConfig(heldout_fraction=0.0, commits=commits)
        (unit,) = candidates(tmp_path, clone, config=config)
        contents = [content for path, content in unit if len(path) == 40]
        texts = [content if isinstance(content, str) else content.partition(b"\n")[0] for content in contents]
        assert texts == (expected or [b"Adds c", b"Adds b"])


def test_a_history_with_missing_objects_is_counted(tmp_path):
    folder = make_repository(tmp_path / "r", ("first", {"a.py": "x = 1\n"}), ("second", {"a.py": "x = 2\n"}))
    blob = git(folder, "rev-parse", "HEAD~1:a.py").strip()
    (folder / ".git/objects" / blob[:2] / blob[2:]).unlink()
    (unit,) = candidates(tmp_path, folder, config=PrepareConfig(heldout_fraction=0.0, commits=5))
    assert unit == [("a.py", b"x = 2\n"), (git(folder, "rev-parse", "HEAD").strip(), "incomplete history")]


def test_links_and_pointers_are_in_no_commit(tmp_path):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n"
    folder = make_repository(tmp_path / "r", ("first", {"a.py": "x = 1\n"}))
    (folder / "link.py").symlink_to("a.py")
    write_files(folder, {"big.sql": pointer, "b.py": "y = 1\n"})
    git(folder, "add", "--all")
    commit(folder, "second")
    (folder / "link.py").unlink()
    (folder / "link.py").symlink_to("b.py")
    git(folder, "add", "--all")
    commit(folder, "third")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "empty", second=30)
    (unit,) = candidates(tmp_path, folder, config=PrepareConfig(heldout_fraction=0.0, commits=3))
    empty, third, second = (content for path, content in unit if len(path) == 40)
    assert empty == third == "no training file"
    assert b"b.py" in second and b"link.py" not in second and b"big.sql" not in second


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 5\n"
FIRST, SECOND = LFS.format("0" * 64), LFS.format("1" * 64)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FIRST, SECOND),
        (FIRST, None),
        ("SELECT 1;\nSELECT 2;\n", FIRST),
        (FIRST, "SELECT 1;\n"),
        ("SELECT 1;", FIRST.replace("git-lfs", "hawser")),
        (None, "/annex/objects/SHA256E-s5--ab.sql\n"),
    ],
)
def test_no_change_of_a_pointer_is_in_a_commit(tmp_path, before, after):
    (change,) = second_commit(tmp_path, "big.sql", before, after)
    assert b"a/b.py" in change and b"big.sql" not in change


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# Files\n" + FIRST, "# Files\n" + SECOND),
        ("# Files\n" + FIRST, None),
        ("# Files\n" * 9 + FIRST, "# Files\n" * 9 + SECOND),
    ],
)
def test_a_document_that_shows_a_pointer_is_in_its_commit(tmp_path, before, after):
    (change,) = second_commit(tmp_path, "files.md", before, after)
    assert b"git-lfs" in change


def second_commit(tmp_path, path, before, after):
    """The text of a commit that changes b.py and a file: its content before and after, None if there is none."""
    folder = make_repository(tmp_path / "r", ("first", {"b.py": "y = 1\n"} | ({path: before} if before else {})))
    write_files(folder, {"b.py": "y = 2\n"} | ({path: after} if after else {}))
    if after is None:
        (folder / path).unlink()
    git(folder, "add", "--all")
    commit(folder, "second")
    (unit,) = candidates(tmp_path, folder, config=PrepareConfig(heldout_fraction=0.0, commits=1))
    return [content for name, content in unit if len(name) == 40]


def test_repositories_in_a_folder_are_read_one_by_one(tmp_path):
    make_repository(tmp_path / "all/one", ("first", {"a.py": "one\n"}))
    make_repository(tmp_path / "all/deep/two", ("first", {"a.py": "two\n"}))
    write_files(tmp_path / "all", {"loose/a.py": "three\n", ".hidden/b.py": "no\n"})
    assert candidates(tmp_path, tmp_path / "all") == [
        [("a.py", b"two\n"), ("a.py", b"one\n"), ("loose/a.py", b"three\n")]
    ]


def test_units_have_a_size(tmp_path):
    files = {f"m{i}.py": "x" * 99 + "\n" for i in range(10)}
    write_files(tmp_path / "f", files)
    units = candidates(tmp_path, tmp_path / "f", config=PrepareConfig(unit_bytes=250, heldout_fraction=0.0))
    assert [len(unit) for unit in units] == [2] * 5
    assert [path for unit in units for path, _ in unit] == sorted(files)


def history(tmp_path):
    return make_repository(
        tmp_path / "r",
        ("Adds a\n\nand says why", {"a.py": "x = 1\n", "logo.png": b"\0\1"}),
        ("Only a picture", {"logo.png": b"\0\2"}),
        ("Changes much", {"b.py": code(1, 5000)}),
        ("Changes a and c", {"a.py": "x = 2\n", "c.py": "commit x\n\x00commit y\n", "node_modules/d.js": "no\n"}),
    )


def test_commits_are_messages_with_diffs(tmp_path):
    config = PrepareConfig(heldout_fraction=0.0, commits=10)
    (unit,) = candidates(tmp_path, history(tmp_path), config=config)
    texts = [content for path, content in unit if len(path) == 40]
    assert texts[1:3] == ["too large", "no training file"]
    assert texts[0] == (
        b"Changes a and c\n\ndiff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
    )
    assert texts[3] == (
        b"Adds a\n\nand says why\n\ndiff --git a/a.py b/a.py\nnew file mode 100644\n--- /dev/null\n+++ b/a.py\n"
        b"@@ -0,0 +1 @@\n+x = 1\n"
    )


def test_merges_are_skipped_and_the_newest_are_taken(tmp_path):
    folder = history(tmp_path)
    git(folder, "checkout", "--quiet", "-b", "side", "HEAD~2")
    write_files(folder, {"side.py": "s = 1\n"})
    git(folder, "add", "--all")
    commit(folder, "Side")
    git(folder, "merge", "--quiet", "--no-edit", "-")
    commits = list(read_commits(folder, head_commit(folder), 3, 10**6))
    assert sorted(one.message for one in commits) == [b"Changes a and c", b"Changes much", b"Side"]


def test_held_out_files_are_in_no_commit(tmp_path):
    config = PrepareConfig(heldout_fraction=0.5, commits=10)
    names = [f"m{i}.py" for i in range(20)]
    folder = make_repository(tmp_path / "r", ("All", {name: f"x = '{name}'\n" for name in names}))
    write_units([str(folder)], config, tmp_path / "out")
    (unit,) = [read_unit(unit_file(tmp_path / "out", 0))]
    held = {name for name in names if is_heldout(unit.parts[0], name, config)}
    assert 3 < len(held) < 17
    commits = [c.load().decode() for c in read_candidates(unit, config) if c.part.kind == "commits"]
    assert len(commits) == 1 and {name for name in names if name in commits[0]} == set(names) - held


@pytest.mark.parametrize("unit_bytes", [1, 30, 61, 10_000])
def test_rows_are_read_once_wherever_units_begin(tmp_path, unit_bytes):
    rows = [{"text": f"text {i} é\u2028", "n": i} for i in range(9)]
    lines = "\n".join([*(json.dumps(row, ensure_ascii=False) for row in rows), "", "not JSON", '{"body": "x"}', "[1]"])
    (tmp_path / "rows.jsonl").write_text(lines)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=2)
    config = PrepareConfig(heldout_fraction=0.0, unit_bytes=unit_bytes)
    texts = [row["text"].encode() for row in rows]
    for file, expected in (("rows.jsonl", texts + ["no text"] * 3), ("rows.parquet", texts)):
        units = candidates(tmp_path, tmp_path / file, config=config)
        assert [content for unit in units for _, content in unit] == expected
        assert len(units) > 3 or unit_bytes == 10_000


def test_a_row_with_a_path_has_its_language(tmp_path):
    rows = [{"code": "x = 1", "file": "a/b.py"}, {"code": "x", "file": "node_modules/a.js"}, {"code": "x"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = PrepareConfig(heldout_fraction=0.0, text_field="code", path_field="file")
    (unit,) = candidates(tmp_path, tmp_path / "rows.jsonl", config=config)
    assert unit == [("a/b.py", b"x = 1"), ("node_modules/a.js", "vendored"), (unit[2][0], "no text")]


def test_sources_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "bad.parquet").write_text("x")
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "other.parquet")
    git_folder = tmp_path / "empty"
    git_folder.mkdir()
    git(git_folder, "init", "--quiet")
    for name, message in (
        ("none", "--source=.*none does not exist; name a folder"),
        ("a.csv", "is neither a folder nor a .jsonl or .parquet file; convert"),
        ("bad.parquet", "bad.parquet is not a readable Parquet file"),
        ("other.parquet", "has no column 'text' but body; name the column of the text as --text_field"),
        ("empty", "the git repository .*empty has no commit that can be read .*; commit its files"),
    ):
        with pytest.raises(UserError, match=message):
            write_units([str(tmp_path / name)], KEEP_ALL, tmp_path / "out")


def test_a_damaged_repository_is_a_sentence_or_counted(tmp_path):
    folder = make_repository(tmp_path / "r", ("first", {"a.py": "x = 1\n", "b.py": "y = 1\n"}))
    config = KEEP_ALL
    other = git(folder, "rev-parse", "HEAD:b.py").strip()
    (folder / ".git/objects" / other[:2] / other[2:]).rename(tmp_path / "b.py")  # before it is listed
    write_units([str(folder)], config, tmp_path / "out")
    (tmp_path / "b.py").rename(folder / ".git/objects" / other[:2] / other[2:])
    blob = git(folder, "rev-parse", "HEAD:a.py").strip()
    (folder / ".git/objects" / blob[:2] / blob[2:]).unlink()
    (first, second) = read_candidates(read_unit(unit_file(tmp_path / "out", 0)), config)
    assert (first.path, second.path) == ("a.py", "b.py")
    seen = []
    for candidate in read_candidates(read_unit(unit_file(tmp_path / "out", 0)), config):
        try:
            seen.append(candidate.load())
        except OSError as error:
            seen.append(str(error))
    assert seen == [f"{folder} lacks the object {blob}", b"y = 1\n"]


def test_a_damaged_repository_is_not_read_as_the_one_around_it(tmp_path):
    make_repository(tmp_path, ("first", {"a.py": "x = 1\n"}))
    (tmp_path / "inner/.git").mkdir(parents=True)
    with pytest.raises(UserError, match="inner has no commit that can be read"):
        head_commit(tmp_path / "inner")
