"""Atomic writes: the old content or the new, and no file besides."""

import pytest

from composer_jax.atomic_write import open_atomically, write_atomically
from composer_jax.errors import UserError


def test_the_new_content_replaces_the_old(tmp_path):
    path = tmp_path / "new" / "folder" / "a.json"
    for content in (b"one", b"two"):
        assert write_atomically(path, content) == path
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_an_error_in_the_block_leaves_the_old_content_and_no_temporary_file(tmp_path):
    path = write_atomically(tmp_path / "a", b"old")
    with pytest.raises(ZeroDivisionError), open_atomically(path) as file:
        file.write(b"half of the n")
        _ = 1 / 0
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_names_the_file_and_the_way_out(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot write .*file/a: .*; free some space or choose a folder"):
        write_atomically(tmp_path / "file" / "a", b"")


def test_a_full_disk_leaves_the_old_content(tmp_path, monkeypatch):
    path = write_atomically(tmp_path / "a", b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
