"""Local copies of folders and files at URLs."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from composer_jax.errors import UserError
from composer_jax.storage.bucket import BucketFolder
from composer_jax.storage.local_copy import local_copy


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """An empty file system at memory://, and an empty folder for the copies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fs = MemoryFileSystem()
    fs.rm("/", recursive=True) if fs.ls("/") else None
    return fs


def test_a_path_of_this_machine_is_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_copy("~/tasks") == tmp_path / "tasks"
    assert local_copy(tmp_path / "absent") == tmp_path / "absent"


def test_a_folder_is_copied_once_until_it_changes(remote, monkeypatch):
    remote.pipe({"/b/tasks/one/task.toml": b"1", "/b/tasks/one/tests/empty": b"", "/b/tasksuite/x": b"other"})
    copy = local_copy("memory://b/tasks/")
    files = {path.relative_to(copy).as_posix(): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert copy.name == "tasks" and files == {"one/task.toml": b"1", "one/tests/empty": b""}
    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "get", lambda *_, **__: pytest.fail("it was downloaded again"))
        assert local_copy("memory://b/tasks") == copy
    remote.pipe("/b/tasks/one/task.toml", b"22")
    assert (local_copy("memory://b/tasks") / "one" / "task.toml").read_bytes() == b"22"
    assert (copy / "one" / "task.toml").read_bytes() == b"1", "a run that reads it is not disturbed"


def test_a_file_keeps_its_name(remote):
    remote.pipe("/b/rows.jsonl", b"{}\n")
    copy = local_copy("memory://b/rows.jsonl")
    assert copy.name == "rows.jsonl" and copy.read_bytes() == b"{}\n"


def test_a_copy_that_fails_leaves_nothing(remote, monkeypatch, tmp_path):
    remote.pipe({"/b/tasks/a": b"1", "/b/tasks/b": b"2"})

    def get(self, names, targets):
        with open(targets[0], "wb") as file:
            file.write(b"1")
        raise ConnectionError("reset by peer")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "get", get)
        with pytest.raises(UserError, match="memory://b/tasks cannot be copied to .*: reset by peer"):
            local_copy("memory://b/tasks")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(list(local_copy("memory://b/tasks").iterdir())) == 2


def test_urls_without_files_are_one_sentence(remote, bucket_url):
    for url in ("memory://b/none", f"{bucket_url}/none", "gs://no-such-bucket/none"):
        with pytest.raises(UserError, match=f"{url} does not exist, or is empty; name a folder"):
            local_copy(url)
    with pytest.raises(UserError, match="nonsense://x cannot be read"):
        local_copy("nonsense://x")


def test_a_folder_and_a_file_of_a_bucket(bucket_url):
    folder = BucketFolder(bucket_url)
    for name in ("code/a.py", "code/deep/b.py", "rows.jsonl"):
        folder.write(name, name.encode(), 0)
    code = local_copy(f"{bucket_url}/code")
    assert {path.relative_to(code).as_posix() for path in code.rglob("*.py")} == {"a.py", "deep/b.py"}
    assert local_copy(f"{bucket_url}/rows.jsonl").read_bytes() == b"rows.jsonl"
    folder.write("code/c.py", b"new", 0)
    assert (local_copy(f"{bucket_url}/code") / "c.py").read_bytes() == b"new"
