"""A folder as one document: order, headers, tokens as of preparation, and what is left out."""

import os

import numpy as np
import pytest

from composer_jax.data import text_tokenizer
from composer_jax.data.codebase import encode_codebase, read_codebase
from composer_jax.data.prepare.layout import repository_documents
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from tests.data.prepare.folders import code, make_tokenizer, write_files

FILES = {"b.py": "x = 1\n", "a/z.js": "let y", "a.md": "# Größe\n", "c/__init__.py": code(3)}


def test_files_are_in_alphabetical_order_each_under_its_path(tmp_path):
    found = read_codebase(write_files(tmp_path, FILES))
    assert found.files == {
        "a.md": "<!-- a.md -->\n# Größe\n",
        "a/z.js": "// a/z.js\nlet y\n",
        "b.py": "# b.py\nx = 1\n",
        "c/__init__.py": f"# c/__init__.py\n{code(3)}",
    }
    assert list(found.files) == sorted(FILES) and found.left_out == {}


def test_tokens_are_those_of_a_prepared_repository_and_an_end(tmp_path, monkeypatch):
    """The documents of launch.prepare_data, whose files without imports are in alphabetical order, too."""
    tok = Tokenizer.load(make_tokenizer(tmp_path / "tok") / "tokenizer.json")
    found = read_codebase(write_files(tmp_path / "code", FILES))
    (document,) = repository_documents(FILES, 10**6)
    whole = document.context + document.last
    for batch in (1, 10**6):
        monkeypatch.setattr(text_tokenizer, "_BATCH_CHARACTERS", batch)
        tokens = encode_codebase(found, tok)
        np.testing.assert_array_equal(tokens.ids, [*tok.encode(whole), tok.eod])
        assert tokens.num_bytes.sum() == len(whole.encode())
        for number, path in enumerate(tokens.paths):
            text = tok.decode(tokens.ids[tokens.starts[number] : tokens.starts[number + 1]].tolist())
            assert text == found.files[path] and len(text.encode()) == tokens.num_bytes[number]


def test_files_that_cannot_be_read_or_are_not_source_are_named(tmp_path, monkeypatch):
    bad = {"latin.py": "ä = 1\n".encode("latin-1"), "zero.py": b"a\0b", "empty.py": " \n", ".env.py": "x = 1\n"}
    ignored = {
        "node_modules/a.js": "x\n",
        "build/b.py": "x\n",
        ".git/c.py": "x\n",
        "data.json": "{}",
        "logo.png": b"\0",
    }
    write_files(tmp_path, FILES | bad | ignored | {"long.py": "y = 2\n" * 200_000, "locked.py": "x = 1\n"})
    (tmp_path / "link.py").symlink_to("b.py")
    read = type(tmp_path).read_bytes

    def read_bytes(path):  # a superuser can read every file
        if path.name == "locked.py":
            raise PermissionError
        return read(path)

    monkeypatch.setattr(type(tmp_path), "read_bytes", read_bytes)
    found = read_codebase(tmp_path)
    assert list(found.files) == sorted(FILES)
    assert found.left_out == {
        "secret": [".env.py"],
        "empty": ["empty.py"],
        "wrong encoding": ["latin.py"],
        "unreadable": ["locked.py"],
        "too large": ["long.py"],
        "binary": ["zero.py"],
    }


def test_extensions_choose_files_of_any_kind(tmp_path):
    write_files(tmp_path, FILES | {"d.json": "{}\n"})
    assert list(read_codebase(tmp_path, ["py"]).files) == ["b.py", "c/__init__.py"]
    assert read_codebase(tmp_path, [".json", ".md"]).files["d.json"] == "# d.json\n{}\n"


def test_a_name_that_is_not_utf8_is_shown_as_text(tmp_path):
    try:
        (tmp_path / os.fsdecode(b"\xff.py")).write_text("x = 1\n")
    except OSError:
        pytest.skip("this file system refuses the name")
    found = read_codebase(tmp_path)
    assert list(found.files.values()) == ["# \ufffd.py\nx = 1\n"]
    tok = Tokenizer.load(make_tokenizer(tmp_path / ".tok") / "tokenizer.json")
    assert encode_codebase(found, tok).paths == ["\ufffd.py"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no source file that can be read; name another folder or extension"),
        ({"a.py": b"\xff"}, r"holds no source file that can be read, 1 left out \(wrong encoding\); name"),
    ],
)
def test_a_folder_without_source_is_one_error(tmp_path, files, message):
    with pytest.raises(UserError, match=message):
        read_codebase(write_files(tmp_path, files))
