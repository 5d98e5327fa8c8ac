"""The local mirror of a run's files in a bucket, and what a publish that is interrupted leaves behind."""

import itertools

import pytest

from composer_jax.errors import UserError
from composer_jax.storage.bucket import BucketFolder
from composer_jax.storage.mirror import Mirror, is_mirrored


class Killed(BaseException):
    pass


class MortalFolder(BucketFolder):
    """A bucket folder whose process is killed after a number of writes and deletions."""

    def __init__(self, url: str, requests: int):
        super().__init__(url)
        self._left = iter(range(requests))

    def write(self, name, data, generation):
        self._live()
        return super().write(name, data, generation)

    def delete(self, name, generation):
        self._live()
        super().delete(name, generation)

    def _live(self):
        if next(self._left, None) is None:
            raise Killed


@pytest.fixture
def new_mirror(bucket_url, tmp_path):
    """requests before its process is killed -> a mirror in a folder of its own."""
    numbers = itertools.count()

    def make(requests=None):
        local = tmp_path / f"mirror{next(numbers)}"
        local.mkdir()
        return Mirror(BucketFolder(bucket_url) if requests is None else MortalFolder(bucket_url, requests), local)

    return make


def put(mirror, **files):
    for name, text in files.items():
        path = mirror.local / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def contents(mirror):
    files = (path for path in mirror.local.rglob("*") if path.is_file())
    return {path.relative_to(mirror.local).as_posix(): path.read_text() for path in files}


def test_what_one_machine_publishes_another_one_fetches(new_mirror):
    here, there = new_mirror(), new_mirror()
    put(here, config="{}", metrics__sft="1\n", **{".lock": "x", "data__.tmp": "x", "checkpoints__sft__1": "x"})
    here.publish()
    put(there, rows="left by a killed process", old__deep__file="x")
    there.fetch()
    assert contents(there) == {"config": "{}", "metrics/sft": "1\n"}
    assert not (there.local / "old").exists()
    put(here, metrics__sft="1\n2\n")
    here.publish()
    put(there, metrics__sft="1\n9\n")  # not published before the kill
    there.fetch()
    assert contents(there)["metrics/sft"] == "1\n2\n"


def test_only_what_has_changed_is_transferred(new_mirror, monkeypatch):
    here = new_mirror()
    put(here, a="1", b="2")
    here.publish()
    written, read = [], []
    monkeypatch.setattr(here.folder, "write", lambda name, data, generation: written.append(name) or 1)
    monkeypatch.setattr(here.folder, "read_generation", lambda name, generation: read.append(name))
    here.publish()
    put(here, a="1")  # written again, equal
    here.publish()
    here.fetch()
    assert written == read == []
    put(here, a="3")
    here.publish()
    assert written == ["a"]


def test_an_interrupted_publish_creates_all_of_its_files_or_none(new_mirror, bucket_url):
    first = new_mirror()
    put(first, metrics="1")
    first.publish()
    for requests in range(8):
        killed = new_mirror(requests)
        killed.fetch()
        put(killed, metrics=f"2 {requests}", base__tokenizer="t", base__config="c", base__template="p")
        try:
            killed.publish()
            done = True
        except Killed:
            done = False
        after = new_mirror()
        after.roll_back()
        after.fetch()
        files = contents(after)
        assert files.pop("metrics") in ("1", *(f"2 {i}" for i in range(requests + 1)))
        assert len(files) == (3 if done else 0), requests
        assert ".publishing" not in BucketFolder(bucket_url).names()
        if done:
            return
    raise AssertionError("it was never finished")


def test_a_publish_that_failed_is_finished_by_the_next_one(new_mirror, bucket_url):
    mirror = new_mirror(2)
    put(mirror, a="1", b="2", c="3")
    with pytest.raises(Killed):
        mirror.publish()
    mirror.folder = BucketFolder(bucket_url)
    mirror.publish()
    assert sorted(mirror.folder.list()) == ["a", "b", "c"]


def test_a_file_that_another_process_changed_is_not_overwritten(new_mirror, bucket_url):
    here, there = new_mirror(), new_mirror()
    put(here, results="1")
    here.publish()
    there.fetch()
    put(there, results="2")
    there.publish()
    put(here, results="3")
    with pytest.raises(UserError, match=f"{bucket_url}/results was changed by another process"):
        here.publish()
    new = new_mirror()
    put(new, results="4")
    with pytest.raises(UserError, match="only one run may work in a folder"):
        new.publish()


def test_names_that_are_not_paths_within_the_folder_are_refused(new_mirror, bucket_url):
    BucketFolder(bucket_url).write("a//b", b"x", 0)
    with pytest.raises(UserError, match="the name 'a//b', which is not a path of a file; rename it"):
        new_mirror().fetch()


@pytest.mark.parametrize("name", ["a/../../b", "../b", "a/./b", ".lock", "a/.tmp", "checkpoints/sft/1/w"])
def test_names_that_are_not_mirrored(name):
    assert not is_mirrored(name)
