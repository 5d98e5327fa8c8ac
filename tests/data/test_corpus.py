"""Finding source files: a split fixed by paths, nothing seen on both sides, one sentence for bad folders."""

import os
from pathlib import Path

import pytest

from composer_jax.data.corpus import find_corpus, read_texts
from composer_jax.data.token_cache import cache_file, encode_files, read_encoded
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "source"
    for i in range(40):
        path = root / f"pkg{i % 4}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f{i}(x):\n    return x + {i}\n" * (1 + i % 5))
    return root


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return Tokenizer.train(["def f(x):\n    return x + 1\n"] * 4, vocab_size=290)


def names(files):
    return [file.name for file in files]


def test_split_is_disjoint_complete_and_fixed(folder):
    corpus = find_corpus(folder, heldout_fraction=0.25)
    assert set(names(corpus.train)).isdisjoint(names(corpus.heldout))
    assert len(corpus.train) + len(corpus.heldout) == 40
    assert 3 <= len(corpus.heldout) <= 20
    assert find_corpus(folder, heldout_fraction=0.25) == corpus
    assert set(names(corpus.heldout)) < set(names(find_corpus(folder, heldout_fraction=0.5).heldout))
    assert not find_corpus(folder, heldout_fraction=0).heldout
    # The side of a file depends on its path alone: not on the other files, nor on what it holds.
    for file in corpus.train[::2]:
        file.path.unlink()
    for i in range(40, 60):
        (folder / f"later{i}.py").write_text(f"x = {i}\n")
    corpus.heldout[0].path.write_text("changed = True\n")
    after = find_corpus(folder, heldout_fraction=0.25)
    assert set(names(corpus.heldout)) <= set(names(after.heldout))
    assert set(names(corpus.train[1::2])) <= set(names(after.train))


def test_a_copy_of_a_heldout_file_is_never_trained_on(folder):
    for file in find_corpus(folder, heldout_fraction=0.25).heldout:
        for i in range(5):
            file.path.with_name(f"copy{i}_{file.path.name}").write_bytes(file.path.read_bytes())
    corpus = find_corpus(folder, heldout_fraction=0.25)
    assert {f.digest for f in corpus.train}.isdisjoint(f.digest for f in corpus.heldout)
    assert corpus.skipped["duplicate"] == 5 * len(corpus.heldout)


def test_files_that_are_not_source_are_skipped_and_counted(folder):
    (folder / "binary.py").write_bytes(b"x = 1\0\xff")
    (folder / "nul.py").write_bytes(b"x = 1\0")
    (folder / "latin.py").write_bytes("name = 'é'\n".encode("latin-1"))
    (folder / "huge.py").write_text("x = 1\n" * 200_000)
    (folder / "empty.py").write_text("\n")
    (folder / "broken_link.py").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.py")
    for left_out in ["__pycache__", ".git", "node_modules"]:
        (folder / left_out).mkdir()
        (folder / left_out / "inner.py").write_text(f"where = '{left_out}'\n")
    (folder / "notes.txt").write_text("not code\n")
    corpus = find_corpus(folder)
    assert corpus.skipped == {"not text": 3, "too large": 1, "empty": 1, "unreadable": 2}
    assert len(corpus.train) + len(corpus.heldout) == 40


def test_extensions_and_line_ends(folder):
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    (folder / "b.md").write_text("text\n")
    corpus = find_corpus(folder, extensions=("txt", ".md"), heldout_fraction=0)
    assert {f.name: f.read() for f in corpus.train} == {"a.txt": "one\ntwo\nthree\n", "b.md": "text\n"}


def test_max_bytes_takes_a_prefix_of_the_same_order(folder):
    everything = find_corpus(folder)
    some = find_corpus(folder, max_bytes=500, max_heldout_bytes=1)
    assert names(some.train) == names(everything.train)[: len(some.train)]
    assert sum(f.num_bytes for f in some.train[:-1]) < 500 <= sum(f.num_bytes for f in some.train)
    assert names(some.heldout) == names(everything.heldout)[:1]
    texts = list(read_texts(everything.train, max_bytes=500))
    assert texts == [f.read() for f in some.train]


def test_standard_library_by_default():
    corpus = find_corpus(max_bytes=200_000, max_heldout_bytes=50_000)
    every = names(corpus.train) + names(corpus.heldout)
    assert corpus.heldout and corpus.train
    assert not any(part in {"test", "tests", "site-packages", "idlelib"} for n in every for part in n.split("/"))


def test_bad_folders_are_one_sentence(folder, tmp_path, monkeypatch):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "only.py").write_text("x = 1\n")
    for path, options, word in (
        (tmp_path / "nowhere", {}, "does not exist"),
        (folder / "pkg0" / "module0.py", {}, "is a file"),
        (folder, {"extensions": (".rs",)}, r"no source files \(\.rs\)"),
        (folder, {"heldout_fraction": 1}, "heldout_fraction=1"),
        (alone, {}, "of 1 found, 1 held out"),
    ):
        with pytest.raises(UserError, match=word):
            find_corpus(path, **options)

    real = os.scandir

    def refuse(path):
        if Path(path).name in blocked:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    blocked = {"pkg1"}
    assert find_corpus(folder).skipped == {"unreadable": 1}
    blocked = {"source"}
    with pytest.raises(UserError, match="cannot be read .Permission denied"):
        find_corpus(folder)


def test_a_file_that_changed_is_refused(folder):
    corpus = find_corpus(folder)
    corpus.train[0].path.write_text("other\n")
    with pytest.raises(UserError, match="has changed"):
        corpus.train[0].read()
    corpus.train[1].path.unlink()
    with pytest.raises(UserError, match="no longer be read"):
        corpus.train[1].read()


def test_cache_encodes_once_and_only_the_same(folder, tok, tmp_path, monkeypatch):
    files = find_corpus(folder).train
    cache, seen = tmp_path / "cache", []
    documents = encode_files(tok, files, cache_dir=cache, progress=seen.append)
    assert [tok.decode(d) for d in documents] == [f.read() for f in files]
    assert all(d.dtype == "uint16" for d in documents)
    assert seen == [f.num_bytes for f in files]
    calls = []
    encode_batch = Tokenizer.encode_batch
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *a: calls.append(1) or encode_batch(*a))

    def same(other):
        return len(other) == len(documents) and all((a == b).all() for a, b in zip(other, documents, strict=True))

    assert same(encode_files(tok, files, cache_dir=cache)) and not calls
    assert same(encode_files(tok, files)) and len(calls) == 1  # no cache asked for
    path_of_cache = cache_file(tok, files, cache)
    assert same(read_encoded(path_of_cache)) and len(calls) == 1
    with pytest.raises(UserError, match="tokens-gone.npz cannot be read"):
        read_encoded(cache / "tokens-gone.npz")
    # Fewer files, another tokenizer, a damaged cache: each is encoded anew.
    assert len(encode_files(tok, files[1:], cache_dir=cache)) == len(files) - 1 and len(calls) == 2
    other = Tokenizer.train(["import os\n"] * 9, vocab_size=280)
    assert [other.decode(d) for d in encode_files(other, files, cache_dir=cache)] == [f.read() for f in files]
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes()[:-200])
    assert same(encode_files(tok, files, cache_dir=cache)) and len(calls) == 4
    assert same(encode_files(tok, files, cache_dir=cache)) and len(calls) == 4
    assert not list(cache.glob(".*"))
    for _ in range(2):
        assert encode_files(tok, [], cache_dir=cache) == []
