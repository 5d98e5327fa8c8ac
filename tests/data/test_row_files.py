"""Files of rows: compressed files, arrays, tables with nulls, and files that are refused with one sentence."""

import gzip
import json
import subprocess
import sys

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from composer_jax.data.chat.conversations import read_conversation
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.row_files import read_rows
from composer_jax.errors import UserError

ROWS = [{"text": "é"}, {"text": "b"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
HALVES = (LINES[:9], LINES[9:])


def rows_of(path):
    return [row for _, row in read_rows(str(path))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(LINES)),
        ("b.jsonl.gz", b"".join(map(gzip.compress, HALVES))),
        ("c.jsonl.zst", zstandard.compress(LINES)),
        ("d.jsonl.zst", b"".join(map(zstandard.compress, HALVES))),
        ("e.jsonl", gzip.compress(LINES)),
        ("f.jsonl.gz", LINES),  # a bucket may have decompressed it
        ("g.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        ("h.json", json.dumps(ROWS, indent=2).encode()),
        ("i.json", b"\n" + json.dumps(ROWS).encode()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a compressed file holds the time
)
def test_compressed_files_and_arrays_are_read(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert rows_of(tmp_path / name) == ROWS


def test_places_of_an_array_are_rows_and_of_compressed_lines_are_lines(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n" + LINES))
    assert [place for place, _ in read_rows(str(tmp_path / "a.json"))][1] == f"{tmp_path}/a.json, row 2"
    assert [place for place, _ in read_rows(str(tmp_path / "b.jsonl.gz"))][1] == f"{tmp_path}/b.jsonl.gz, line 3"


def test_lines_that_are_arrays_stay_rows(tmp_path):
    for content, rows in (("[1]\n[2]\n", [[1], [2]]), ("[1]\n", [[1]]), ("[]\n", [[]]), ('[["a"]]', [[["a"]]])):
        (tmp_path / "a.jsonl").write_text(content)
        assert rows_of(tmp_path / "a.jsonl") == rows


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl.gz", gzip.compress(LINES)[:-9], "a.jsonl.gz is not a whole gzip file"),
        ("a.jsonl.gz", gzip.compress(LINES)[:5] + b"\xff" * 30, "a.jsonl.gz is not a whole gzip file"),
        ("a.jsonl.zst", zstandard.compress(LINES)[:-9], "a.jsonl.zst is not a whole zstd file"),
        ("a.jsonl.zst", zstandard.compress(LINES)[:5] + b"\xff" * 30, "a.jsonl.zst is not a whole zstd file"),
        ("a.jsonl.bz2", b"BZh91AY", "compressed with bzip2; compress it with gzip or zstd"),
        ("a.zip", b"PK\x03\x04", "a zip archive; unpack it"),
        ("a.json", b'[\n{"text": "a"},\n{"text"', "a.json is neither lines of JSON nor an array"),
        ("a.jsonl.gz", gzip.compress(b"{}\n{"), "a.jsonl.gz, line 2 is not JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_files_are_one_sentence(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=reason):
        rows_of(tmp_path / name)


def called(*arguments):
    calls = [{"type": "function", "function": {"name": "run", "arguments": value}} for value in arguments]
    answers = [{"role": "tool", "content": "x", "weight": 0.0}] * len(calls)
    asked = {"role": "assistant", "content": None, "tool_calls": calls, "weight": 1.0}
    return [{"role": "user", "content": "Go"}, asked, *answers, {"role": "assistant", "content": "Done."}]


def table(tmp_path, *rows):
    parquet.write_table(pa.Table.from_pylist(list(rows)), tmp_path / "a.parquet")
    return [read_conversation(row) for row in rows_of(tmp_path / "a.parquet")]


def calls_of(conversation):
    return [call.arguments for turn in conversation.turns for call in turn.message.calls]


def test_keys_that_a_table_filled_in_are_absent(tmp_path):
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    other = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
    tools = [{"type": "function", "function": {"name": "run", "parameters": value}} for value in (schema, other)]
    nested = {"edits": [{"old": "a"}, {"new": "b"}], "path": "a.py"}
    (read,) = table(tmp_path, {"messages": called({"path": "a.py"}, {"cmd": "ls"}, nested), "tools": tools})
    assert calls_of(read) == [{"path": "a.py"}, {"cmd": "ls"}, nested]
    assert [tool.parameters for tool in read.tools] == [schema, other]


def test_texts_of_json_in_a_table_stay_exact(tmp_path):
    tool = {"name": "run", "parameters": {"type": "object", "default": None}}
    row = {"messages": called('{"path": null}', '{"cmd": "ls", "n": [null]}'), "tools": json.dumps([tool])}
    (read,) = table(tmp_path, row)
    assert calls_of(read) == [{"path": None}, {"cmd": "ls", "n": [None]}]
    assert read.tools[0].parameters == tool["parameters"]
    (read,) = table(tmp_path, {"messages": json.dumps(called({"path": None})), "tools": None, "system": None})
    assert calls_of(read) == [{"path": None}], "a null in JSON is a value"


def test_messages_of_several_forms_share_a_table(tmp_path):
    legacy = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "function_call": {"name": "run", "arguments": "{}"}},
        {"role": "function", "name": "run", "content": "x"},
        {"role": "assistant", "content": "Done.", "reasoning_content": "Hm.", "weight": 1.0},
    ]
    older, newer = table(tmp_path, {"messages": legacy}, {"messages": called("{}")})
    assert older.turns[0].message.calls == newer.turns[0].message.calls == (ToolCall("run", {}),)
    assert older.turns[1].message.content == "<think>\nHm.\n</think>\n\nDone."
    assert newer.turns[1].message.content == "Done."


def test_a_program_that_reads_a_table_ends_well(tmp_path):
    table(tmp_path, {"messages": called("{}")})
    program = (
        "import sys\nfrom composer_jax.data.row_files import read_rows\nprint(len(list(read_rows(sys.argv[1]))))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.parquet")], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
