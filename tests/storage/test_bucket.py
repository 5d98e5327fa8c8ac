"""Objects of a bucket, and the sentences about buckets that cannot be used."""

import pytest

from composer_jax.errors import UserError
from composer_jax.storage.bucket import BucketFolder, ChangedObject, content_md5


def test_a_write_names_the_generation_that_it_replaces(bucket_url):
    folder = BucketFolder(bucket_url)
    assert folder.read("a/b.json") is None
    first = folder.write("a/b.json", b"1", 0)
    with pytest.raises(ChangedObject):
        folder.write("a/b.json", b"2", 0)
    second = folder.write("a/b.json", b"2", first)
    assert folder.read("a/b.json") == (b"2", second)
    with pytest.raises(ChangedObject):
        folder.write("a/b.json", b"3", first)
    with pytest.raises(ChangedObject):
        folder.read_generation("a/b.json", first)
    folder.delete("a/b.json", first)
    assert folder.list() == {"a/b.json": (second, content_md5(b"2"))}
    folder.delete("a/b.json", second)
    assert folder.list() == {} and folder.names() == []


def test_a_write_whose_answer_was_lost_has_succeeded(bucket_url):
    folder = BucketFolder(bucket_url)
    written = folder.write("x", b"the same", 0)
    assert folder.write("x", b"the same", 0) == written  # as a client repeats it


def test_large_objects_are_written_under_the_same_condition(bucket_url):
    folder, data = BucketFolder(bucket_url), bytes(9_000_000)  # uploaded in parts
    folder.write("big", data, 0)
    assert folder.read("big") is not None
    with pytest.raises(ChangedObject):
        folder.write("big", data[1:], 0)


def test_names_are_relative_and_one_level_deep(bucket_url):
    folder = BucketFolder(bucket_url)
    for name in ("config.json", "stages/sft.json", "checkpoints/sft/1/w"):
        folder.write(name, b"", 0)
    assert folder.names() == ["checkpoints/", "config.json", "stages/"]
    assert list(folder.list("stages/")) == ["stages/sft.json"]


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://", "memory://x", "file:///tmp/run"])
def test_other_urls_are_not_a_place_for_a_run(url):
    with pytest.raises(UserError, match=f"{url} is not a place for a run; use a local folder or gs://BUCKET/FOLDER"):
        BucketFolder(url)


def test_a_bucket_that_does_not_exist_is_one_sentence(bucket_url):
    folder = BucketFolder("gs://no-such-bucket/run")
    sentence = "the bucket gs://no-such-bucket does not exist; create it or name another"
    for call in (folder.names, folder.list, lambda: folder.read("x"), lambda: folder.write("x", b"", 0)):
        with pytest.raises(UserError, match=sentence):
            call()


def test_a_service_that_does_not_answer_is_one_sentence(bucket_url, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"gs://bucket/run cannot be reached \(.*\); try again later"):
        BucketFolder("gs://bucket/run", patience_s=0.2).names()
