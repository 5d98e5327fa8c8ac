"""What deleting a session leaves on disk, and what it costs."""

import contextlib
import os
import sqlite3
import time
from pathlib import Path

import pytest

from composer_jax.serve.traffic import retention, turn_files
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.retention import add_tombstones, erase, forget
from composer_jax.serve.traffic.writer import TrafficLimits
from tests.serve.test_control import wait_until
from tests.serve.traffic.conftest import offer, stored


def test_rows_leave_the_log_also_where_a_reader_prevents_it_at_first(new_writer, folder, monkeypatch):
    monkeypatch.setattr("composer_jax.serve.traffic.writer.RETRY_SECONDS", 0.05)
    writer = new_writer(TrafficLimits(flush_seconds=0.01, busy_seconds=0.05))
    offer(writer, "planted session")
    wait_until(lambda: writer.counts.written_turns == 1)
    log = folder / "traffic.sqlite-wal"
    with contextlib.closing(sqlite3.connect(folder / "traffic.sqlite", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM turns").fetchone() == (1,)
        forget(folder, session="planted session")
        wait_until(lambda: not [*folder.glob("turns/*/*")])
        time.sleep(0.2)
        assert b"planted session" in log.read_bytes()
    wait_until(lambda: not log.exists() or log.stat().st_size == 0)


def test_the_name_of_a_copy_is_on_disk_before_rows_name_it(new_writer, folder, monkeypatch):
    writer = new_writer(TrafficLimits(flush_seconds=600.0, batch_turns=2))
    for session in "ab":
        offer(writer, session)
    writer.close()
    steps, fsync, sync_rows = [], os.fsync, sqlite3.Connection.executemany

    class Database(sqlite3.Connection):
        def executemany(self, query, rows):
            steps.append(query.partition(" ")[0])
            return sync_rows(self, query, rows)

    def sync(descriptor):
        steps.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    (day,) = (path.name for path in folder.glob("turns/*"))
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **options: connect(path, factory=Database, **options))
    with contextlib.closing(open_database(folder)) as database:
        with database:
            add_tombstones(database, ["a"], "forgotten", 1.0)
        monkeypatch.setattr(os, "fsync", sync)
        assert erase(folder, database, 1.0) == ({"a"}, {day})
    assert steps.index(day) < steps.index("UPDATE")


def test_a_file_whose_rows_were_not_written_is_deleted(new_writer, folder, monkeypatch):
    writer, append = new_writer(), turn_files.append
    offer(writer, "before")
    wait_until(lambda: writer.counts.written_turns == 1)
    (file,) = folder.glob("turns/*/*")
    size = file.stat().st_size

    def fail(*arguments):
        append(*arguments)
        raise sqlite3.OperationalError("disk I/O error")

    for most in (1 << 20, 1):  # behind the rows of a file, and in a new one
        with monkeypatch.context() as patch:
            patch.setattr(turn_files, "append", fail)
            patch.setattr(turn_files, "MOST_FILE_BYTES", most)
            offer(writer, f"lost {most}")
            wait_until(lambda: writer.counts.dropped_sessions >= 1 and not writer._dropping and not writer.queue_length)
        assert [(path, path.stat().st_size) for path in folder.glob("turns/*/*")] == [(file, size)]
    writer.close()
    assert {*stored(folder)} == {"before"}


@pytest.fixture
def many_frames(folder):
    """(n) -> the database of a folder with a file of n frames, of a session each."""
    with contextlib.ExitStack() as stack:

        def write(n):
            (folder / "turns" / "2026-01-01").mkdir(parents=True, exist_ok=True)
            (folder / "turns" / "2026-01-01" / "000.jsonl.zst").write_bytes(b"x" * n)
            database = stack.enter_context(contextlib.closing(open_database(folder)))
            with database:
                rows = [(f"t{i}", f"s{i}", "2026-01-01/000", i, 1, 4, b"", 0) for i in range(n)]
                database.executemany("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
            return database

        yield write


def test_erasing_a_session_takes_time_in_proportion_to_the_frames(many_frames, folder, monkeypatch):
    database = many_frames(30_000)
    monkeypatch.setattr(turn_files, "read_frame", lambda *_: b"x")
    with database:
        add_tombstones(database, ["s7"], "forgotten", 1.0)
    began = time.thread_time()
    sessions, days = retention.erase(folder, database, 1.0)
    assert time.thread_time() - began < 4, "seconds; with each frame compared with each row, 16"
    assert sessions == {"s7"} and days == {"2026-01-01"}
    assert database.execute("SELECT count(*) FROM turns").fetchone() == (29_999,)


def test_finding_the_end_of_a_day_does_not_read_its_rows(many_frames, new_writer, folder):
    writer = new_writer()
    database = many_frames(5000)
    steps = []
    database.set_progress_handler(lambda: steps.append(1), 100)
    assert writer._find_end(database, "2026-01-01") == ("2026-01-01/000", 5000)
    assert len(steps) < 10, "hundreds of instructions of the database; there are 5,000 rows"


def test_deleting_a_session_leaves_the_others_in_memory(new_writer, folder):
    writer = new_writer()
    for session in "ab":
        offer(writer, session)
    wait_until(lambda: writer.counts.written_turns == 2)
    forget(folder, session="a")
    wait_until(lambda: "a" not in writer._open)
    assert {*writer._open} == {"b"}
    offer(writer, "b", [1, 2, 9, 8, 3])
    writer.close()
    assert [turn.suffix for turn in stored(folder)["b"].turns] == [[1, 2], [3]]


def test_turns_of_others_in_a_frame_are_not_parsed(new_writer, folder, monkeypatch):
    writer = new_writer(TrafficLimits(flush_seconds=600.0, batch_turns=3))
    for session in "abc":
        offer(writer, session)
    writer.close()
    before, loads, lines = stored(folder), turn_files.json.loads, []
    monkeypatch.setattr(turn_files.json, "loads", lambda line: (lines.append(line), loads(line))[1])
    assert stored(folder) == before and len(lines) == len([line for line in lines if b'"suffix"' not in line]) + 3
