"""Preparation from sources to shards: what is written, and that workers and interruptions do not change it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from composer_jax.data.chat.load_chat_format import load_tokenizer
from composer_jax.data.prepare.config import PrepareConfig
from composer_jax.data.prepare.prepare import prepare
from composer_jax.data.prepared import prepared_documents
from composer_jax.errors import UserError
from tests.data.model_folders import tokenizer_json
from tests.data.prepare.folders import code, make_repository, make_tokenizer, write_files

CONFIG = PrepareConfig(heldout_fraction=0.2, unit_bytes=20_000, commits=5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    similar = code(500, 60)
    make_repository(
        folder / "repositories/one",
        ("first", {f"p/m{i:02d}.py": f"from p import m{i + 1:02d}\n" + code(i) for i in range(40)}),
        ("second", {"p/m03.py": code(103), "README.md": "# One\n"}),
    )
    write_files(
        folder / "tree",
        {
            **{f"n{i}.py": code(200 + i) for i in range(40)},
            "copy.py": code(205),
            "similar1.py": similar,
            "similar2.py": similar.replace("\n", " # changed\n", 2),
            "latin.py": "name = 'é'\n".encode("latin-1"),
            "picture.png": b"\x89PNG\0",
            "vendor/v.py": code(1),
            "minified.py": "x = [" + "1, " * 900 + "]\n",
            "key.py": "key = 'AK" + "IA" + "Q7R2T5V8X1Z4B6D9'\n",
        },
    )
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": code(300 + i)}) + "\n" for i in range(30)) + "no JSON\n")
    return [str(folder / "repositories"), str(folder / "tree"), str(rows)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, sources, tokenizer):
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, prepare(sources, tokenizer, out, CONFIG)


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def texts(out: Path, split: str, tokenizer: str) -> list[str]:
    tok = load_tokenizer(tokenizer)
    return [tok.decode(document[:].tolist()) for document in prepared_documents(str(out), split, tok)]


def test_documents_and_counts(whole, tokenizer):
    out, index = whole
    tables = index["statistics"]
    left_out = {reason: count for reason, (count, _) in tables["left out"].items()}
    assert left_out["near duplicate"] == 1 and left_out["exact duplicate"] == 1
    for reason in ("wrong encoding", "unknown language", "vendored", "minified", "secret", "no text"):
        assert left_out[reason] == 1, reason
    total = sum(count for count, _ in tables["candidates"].values())
    assert total == sum(left_out.values()) + sum(count for count, _ in tables["languages"].values())
    train, heldout = texts(out, "train", tokenizer), texts(out, "heldout", tokenizer)
    assert len(train) == index["train"]["documents"] and len(heldout) == index["heldout"]["documents"] > 0
    assert sum(tokens for _, tokens in tables["train"].values()) == index["train"]["tokens"]
    for i in (*range(200, 240), *range(300, 330)):
        sides = [any(code(i) in text for text in side) for side in (train, heldout)]
        assert sides in ([True, False], [False, True]), i
    page = (out / "statistics.md").read_text()
    assert "| wrong encoding | 1 |" in page and "| python |" in page and "| rows.jsonl" not in page


def test_a_repository_is_in_the_order_of_its_imports_and_its_commits_have_messages(whole, tokenizer):
    train = texts(whole[0], "train", tokenizer)
    pairs = 0
    for text in (text for text in train if text.startswith("# p/m")):
        place = {line: i for i, line in enumerate(text.splitlines()) if line.startswith("# p/m")}
        for i in range(40):  # each imports the next one, except the third, which has changed
            importer, imported = place.get(f"# p/m{i:02d}.py"), place.get(f"# p/m{i + 1:02d}.py")
            if importer is not None and imported is not None and i != 3:
                assert imported < importer
                pairs += 1
    assert pairs > 10
    assert any(text.startswith("second\n\ndiff --git a/") for text in train)


def test_two_workers_write_the_same_bytes(whole, sources, tokenizer, tmp_path):
    prepare(sources, tokenizer, tmp_path / "out", CONFIG, workers=2)
    assert contents(tmp_path / "out") == contents(whole[0])


def test_a_finished_preparation_is_returned(whole, sources, tokenizer):
    before = contents(whole[0])
    assert prepare(sources, tokenizer, whole[0], CONFIG) == whole[1]
    assert contents(whole[0]) == before


def test_a_folder_of_another_config_is_refused(whole, sources, tokenizer, tmp_path):
    with pytest.raises(UserError, match="was prepared with commits=5, not 0; use the same value, or a new --out"):
        prepare(sources, tokenizer, whole[0], PrepareConfig(heldout_fraction=0.2, unit_bytes=20_000))
    with pytest.raises(UserError, match=r"was prepared with sources=\[.*use the same value"):
        prepare(sources[:1], tokenizer, whole[0], CONFIG)
    write_files(tmp_path, {"mine.txt": "mine"})
    with pytest.raises(UserError, match="holds other files; name a folder that is empty"):
        prepare(sources, tokenizer, tmp_path, CONFIG)


LIMITED = """
import json, resource, sys
from composer_jax.data.prepare.config import PrepareConfig
from composer_jax.data.prepare.prepare import prepare
from composer_jax.errors import UserError
if __name__ == "__main__":
    sources, tokenizer, out, fields = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    try:
        prepare(sources, tokenizer, out, PrepareConfig(**fields))
    except UserError as error:
        sys.exit(str(error))
"""


def test_a_full_disk_is_a_sentence_and_the_same_command_continues(whole, sources, tokenizer, tmp_path):
    out, script = tmp_path / "out", tmp_path / "limited.py"
    script.write_text(LIMITED)
    command = [sys.executable, str(script), json.dumps([sources, tokenizer, str(out), asdict(CONFIG)])]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert run.returncode == 1 and "cannot write " in run.stderr and "free some space" in run.stderr, run.stderr
    prepare(sources, tokenizer, out, CONFIG)
    assert contents(out) == contents(whole[0])


def test_a_source_that_changes_meanwhile_is_named(sources, tokenizer, tmp_path):
    write_files(tmp_path / "s", {"a.py": code(1), "b.py": code(3)})
    out = tmp_path / "out"
    prepare([str(tmp_path / "s")], tokenizer, out, CONFIG)
    for path in (out / "index.json", *out.glob("units/*.tokens.json")):
        path.unlink()  # as if it had been stopped
    write_files(tmp_path / "s", {"a.py": code(2), "b.py": code(4)})
    with pytest.raises(UserError, match=r"[ab].py has changed since it was filtered; prepare the data in a new folder"):
        prepare([str(tmp_path / "s")], tokenizer, out, CONFIG)


def test_nothing_to_train_on(tokenizer, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="--source=.*empty holds no files; name a folder with source files"):
        prepare([str(tmp_path / "empty")], tokenizer, tmp_path / "a", CONFIG)
    write_files(tmp_path / "s", {"logo.png": b"\0", "a.py": b"\xff\xfe"})
    with pytest.raises(UserError, match=r"nothing to train on \(left out: 1 unknown language, 1 wrong encoding"):
        prepare([str(tmp_path / "s")], tokenizer, tmp_path / "b", CONFIG)
    with pytest.raises(UserError, match="no tokenizer.json"):
        prepare([str(tmp_path / "s")], str(tmp_path), tmp_path / "c", CONFIG)
    with pytest.raises(UserError, match="workers=0; use at least 1"):
        prepare([str(tmp_path / "s")], tokenizer, tmp_path / "c", CONFIG, workers=0)


def test_a_share_of_documents_fills_in_the_middle(sources, tokenizer, tmp_path):
    names = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    (tmp_path / "t").mkdir()
    (tmp_path / "t/tokenizer.json").write_text(tokenizer_json(dict.fromkeys(names, True)))
    config = PrepareConfig(heldout_fraction=0.3, documents="file", fim_share=0.5)
    index = prepare(sources[1:2], str(tmp_path / "t"), tmp_path / "out", config)
    train = texts(tmp_path / "out", "train", str(tmp_path / "t"))
    cut = [text for text in train if names[0] in text]
    assert len(cut) == index["statistics"]["fill in the middle"][sources[1]][0]
    assert 0.2 * len(train) < len(cut) < 0.8 * len(train)
    originals = {code(200 + i) for i in range(40)}
    for text in cut:
        prefix, rest = text.removeprefix(names[0]).split(names[1])
        suffix, middle = rest.split(names[2])
        originals.discard(prefix + middle + suffix)
    assert len(originals) <= 40 - len(cut) + 2  # similar1.py and copy.py may be among them
    assert not any(names[0] in text for text in texts(tmp_path / "out", "heldout", str(tmp_path / "t")))
    with pytest.raises(UserError, match="has no tokens for filling in the middle"):
        prepare(sources, tokenizer, tmp_path / "other", config)


def test_values_out_of_range_are_refused():
    fields = {
        "languages": ("python", "pyton"),
        "unit_bytes": 0,
        "fim_share": 1.5,
        "heldout_fraction": 1.0,
        "commits": -1,
    }
    for name, value in {**fields, "text_field": ""}.items():
        with pytest.raises(UserError, match=name):
            PrepareConfig(**{name: value})


def test_a_held_out_text_is_nowhere_in_training(whole, tokenizer):
    held = {line for text in texts(whole[0], "heldout", tokenizer) for line in text.splitlines() if " = " in line}
    train = {line for text in texts(whole[0], "train", tokenizer) for line in text.splitlines()}
    assert held and not held & train
    assert np.isin(["+" + line for line in held], list(train)).sum() == 0
