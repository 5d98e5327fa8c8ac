"""Forgotten users, old days, and folders that a server refuses."""

import contextlib
import json
import os
import sqlite3

import pytest

from composer_jax.errors import UserError
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.serve.traffic.policy import read_policy
from composer_jax.serve.traffic.retention import add_tombstones, erase, expire, forget, recover
from composer_jax.serve.traffic.writer import TrafficLimits
from tests.serve.test_control import wait_until
from tests.serve.traffic.conftest import all_bytes, offer, stored
from tests.serve.traffic.test_dropped_sessions import locked
from tests.serve.traffic.test_killed_writer import rows_of

DAY = 86_400


@pytest.fixture
def fill(served, text, folder):
    """Writes two sessions of alice and one of bob, with an event and a label each."""

    def run(**options):
        with served(lambda context: [9, 8, *text.end_tokens[:1]], **options) as (server, _):
            for session, user in (("a1", "alice"), ("b", "bob"), ("a2", "alice")):
                server.ask([1, 2], session, headers={"X-User-ID": user})
                server.ask([1, 2, 9, 8, 3], session, headers={"X-User-ID": user})
                assert server.events({"id": "e", "kind": "follow_up"}, session=session).status_code == 200
        with contextlib.closing(open_database(folder)) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS labels (session TEXT, reward REAL)")
            database.executemany("INSERT INTO labels VALUES (?, 1)", [("a1",), ("b",)])
        return stored(folder)

    return run


@pytest.mark.parametrize("by", ["name", "hash", "session"])
def test_a_forgotten_user_is_in_no_later_read_and_in_no_file(fill, folder, by):
    before = fill()
    hashed = before["a1"].record.user
    chosen = {"session": "a1"} if by == "session" else {"user": "alice" if by == "name" else hashed}
    gone = {"a1"} if by == "session" else {"a1", "a2"}
    for _ in range(2):  # a second call changes nothing
        forget(folder, **chosen)
        assert stored(folder) == {name: one for name, one in before.items() if name not in gone}
    assert rows_of(folder) == sorted(turn.id for name in before.keys() - gone for turn in before[name].turns)
    reader = TrafficFolder(folder)
    assert {name for name in before if reader.is_forgotten(name)} == gone
    with pytest.raises(UserError, match="'a1'"):
        reader.read("a1")
    with contextlib.closing(sqlite3.connect(folder / "traffic.sqlite")) as database:
        for table in ("sessions", "turns", "events", "labels"):
            assert gone.isdisjoint(row[0] for row in database.execute(f"SELECT session FROM {table}"))
    assert not any(b"alice" in data for data in all_bytes(folder).values())


def test_users_are_forgotten_by_any_name_and_by_their_key(served, text, folder):
    with served(lambda context: [9, *text.end_tokens[:1]]) as (server, _):
        for session, key, user in (("a", "", "\xe9lise"), ("b", "k", ""), ("c", "", "key k"), ("d", "l", "")):
            server.ask([1, 2], session, key=key, headers={"X-User-ID": user})
    assert forget(folder, user="\xe9lise") == ["a"]
    assert forget(folder, user="k") == ["b"]
    assert {*stored(folder)} == {"c", "d"}


def test_what_is_forgotten_while_another_process_forgets_is_deleted(fill, folder, monkeypatch):
    fill()

    def erase_late(folder, database, now):
        monkeypatch.undo()
        recover(folder, database, now)
        assert forget(folder, session="b") == ["b"]  # it meets the lock

    monkeypatch.setattr("composer_jax.serve.traffic.retention.recover", erase_late)
    forget(folder, user="alice")
    assert not [*folder.glob("turns/*/*")]


def test_a_database_that_is_locked_keeps_no_copies_and_is_a_sentence(fill, folder, monkeypatch):
    fill()
    (file,) = folder.glob("turns/*/*")
    with contextlib.closing(open_database(folder, busy_seconds=0.0)) as database:
        with database:
            add_tombstones(database, ["b"], "forgotten", 1.0)
        with locked(folder):
            for _ in range(3):
                with pytest.raises(sqlite3.OperationalError):
                    erase(folder, database, 1.0)
            monkeypatch.setitem(open_database.__kwdefaults__, "busy_seconds", 0.0)
            with pytest.raises(UserError, match="locked"):
                forget(folder, session="a1")
        assert [*folder.glob("turns/*/*")] == [file]


def test_a_copy_that_is_not_named_is_deleted(fill, folder, monkeypatch):
    fill()
    (file,) = folder.glob("turns/*/*")

    def fail(*_):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("composer_jax.serve.traffic.retention.add_tombstones", fail)
    with contextlib.closing(open_database(folder)) as database:
        with database:
            add_tombstones(database, ["b"], "forgotten", 1.0)
        with pytest.raises(sqlite3.OperationalError):
            erase(folder, database, 1.0)
    assert [*folder.glob("turns/*/*")] == [file]


@pytest.mark.parametrize("damage", ["change", "delete"])
def test_a_broken_frame_drops_its_sessions_and_no_other(new_writer, folder, damage):
    writer = new_writer(TrafficLimits(flush_seconds=600.0, batch_turns=2))
    for session in "abcd":  # two frames
        offer(writer, session)
    writer.close()
    (file,) = folder.glob("turns/*/*")
    data = bytearray(file.read_bytes())
    data[20] ^= 255
    if damage == "change":
        file.write_bytes(data)
    else:
        file.unlink()
    assert forget(folder, session="b") == ["b"]
    new_writer().close()
    assert {*stored(folder)} == ({"c", "d"} if damage == "change" else set())


def test_a_server_deletes_what_another_process_forgets(served, text, folder):
    with served(lambda context: [9, 8, *text.end_tokens[:1]]) as (server, writer):
        server.ask([1, 2], "a", headers={"X-User-ID": "alice"})
        server.ask([1, 2], "b", headers={"X-User-ID": "bob"})
        wait_until(lambda: writer.counts.written_turns == 2)
        assert forget(folder, user="alice") == ["a"]
        assert {*stored(folder)} == {"b"}
        wait_until(lambda: len(rows_of(folder)) == 1)
        server.ask([1, 2, 9, 8, 3], "a", headers={"X-User-ID": "alice"})
        wait_until(lambda: writer.counts.refused_turns == 1)
        server.ask([1, 2], "new", headers={"X-User-ID": "alice"})
        server.ask([1, 2, 9, 8, 3], "b", headers={"X-User-ID": "bob"})
    assert {name: len(one.turns) for name, one in stored(folder).items()} == {"b": 2, "new": 1}


def test_old_days_are_deleted_at_the_start_and_once_a_day(fill, folder, new_writer, policy_file, served, text):
    file, now = policy_file(retention_days=2), [1e9]
    fill(file=file, clock=lambda: now[0])
    now[0] += 2 * DAY
    with served(lambda context: [9, *text.end_tokens[:1]], file=file, clock=lambda: now[0]) as (server, writer):
        server.ask([1, 2], "later")
        wait_until(lambda: writer.counts.written_turns == 1)
        assert {*stored(folder)} == {"a1", "a2", "b", "later"}
        now[0] += DAY
        wait_until(lambda: [one.session for one in TrafficFolder(folder).sessions()] == ["later"])
        server.ask([1, 2], "a1")  # a session that expired begins anew
        wait_until(lambda: writer.counts.written_turns == 2)
    assert {path.name for path in folder.glob("turns/*")} == {"2001-09-11", "2001-09-12"}
    now[0] += 3 * DAY
    new_writer(file=file, clock=lambda: now[0])
    assert stored(folder) == {} and rows_of(folder) == []


def test_a_session_goes_on_after_a_restart_and_is_dropped_after_a_kill(served, text, folder, new_writer):
    def ask(prompt):
        with served(lambda context: [9, 8, *text.end_tokens[:1]]) as (server, _):
            server.ask(prompt, "s")

    ask([1, 2])
    ask([1, 2, 9, 8, text.end_tokens[0], 3])
    turns = stored(folder)["s"].turns
    assert turns[1].parent == turns[0].id and turns[1].suffix == [3]
    with contextlib.closing(open_database(folder)) as database, database:
        database.execute("UPDATE runs SET closed = 0")  # as after a kill
    assert len(stored(folder)["s"].turns) == 2, "what was written is a beginning of the session"
    ask([1, 2, 9, 8])
    assert stored(folder) == {} and TrafficFolder(folder).is_forgotten("s")


def test_folders_that_a_server_refuses(new_writer, folder, policy_file, tmp_path, text, monkeypatch):
    with pytest.raises(UserError, match="consent_text"):
        new_writer(file="")
    writer = new_writer()
    with pytest.raises(UserError, match="in use by process"):
        new_writer()
    writer.close()
    new_writer(file="").close()  # the folder has its policy now
    with pytest.raises(UserError, match="does not exist"):
        new_writer(file="missing.json")
    for fields, part in (
        ({"consent_text": " "}, "consent_text"),
        ({"retention_days": 0}, "retention_days"),
        ({"retention_days": 10**6}, "retention_days is 1000000; give a number of days from 1 to 36500"),
        ({"salt": 5}, "salt is 5"),
        ({"sampling_fraction": 2}, "sampling_fraction"),
        ({"organisations": {"o": {"consent": "all"}}}, "organisations.o.consent"),
        ({"organisations": {"o": {"consent": "none", "keys": ["k"]}}}, "organisations.o.keys"),
        ({"unknown": 1}, "unknown"),
        ({"schema": 2}, "schema 2"),
    ):
        with pytest.raises(UserError, match=part):
            new_writer(file=policy_file(**fields))
    policy_file()
    monkeypatch.setattr("composer_jax.serve.traffic.writer.text_fingerprint", lambda text: "0123")
    with pytest.raises(UserError, match="another tokenizer or template"):
        new_writer()
    monkeypatch.undo()
    content = json.loads((folder / "policy.json").read_text())
    (folder / "policy.json").write_text(json.dumps(content | {"schema": 2}))
    for refused in (new_writer, lambda: TrafficFolder(folder)):
        with pytest.raises(UserError, match="schema 2"):
            refused()


@pytest.mark.parametrize("place", ["", "turns", "turns/2026-01-01", "policy.json", "traffic.sqlite"])
def test_links_are_refused(new_writer, folder, tmp_path, place):
    outside = tmp_path / "outside"
    outside.mkdir()
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    os.symlink(outside, folder / place if place else folder)
    with pytest.raises(UserError, match="is a link"):
        new_writer()
    assert list(outside.iterdir()) == []


def test_nobody_deletes_files_that_no_server_wrote(fill, new_writer, folder, tmp_path):
    outside = tmp_path / "outside" / "2000-01-01"
    outside.mkdir(parents=True)
    foreign = [outside / "000.jsonl.zst", tmp_path / "foreign" / "turns" / "mine" / "thesis.txt"]
    foreign[1].parent.mkdir(parents=True)
    for path in foreign:
        path.write_text("mine")
    with pytest.raises(UserError, match="not a traffic folder"):
        forget(tmp_path / "foreign", session="s")
    assert {path.name for path in (tmp_path / "foreign").iterdir()} == {"turns"}
    fill()
    os.symlink(outside, folder / "turns" / "2000-01-01")
    with pytest.raises(UserError, match="is a link"):
        forget(folder, session="a1")
    foreign.append(next(folder.glob("turns/2*/000*")).parent / "notes.txt")
    foreign[2].write_text("mine")
    os.symlink(foreign[0], foreign[2].parent / "007.jsonl.zst")
    with contextlib.closing(open_database(folder)) as database:  # links that are made while a server runs
        recover(folder, database, 1e12)
        expire(folder, database, read_policy(folder), 1e11)
    assert all(path.read_text() == "mine" for path in foreign) and stored(folder) == {}
    assert [path.name for path in folder.glob("turns/2*/000*") if not path.parent.is_symlink()] == []


def test_turns_without_their_database_are_not_deleted(fill, new_writer, folder):
    fill()
    for path in folder.glob("traffic.sqlite*"):
        path.unlink()
    files = [*folder.glob("turns/*/*")]
    for refused in (new_writer, lambda: forget(folder, session="a1")):
        with pytest.raises(UserError, match=r"no traffic\.sqlite"):
            refused()
    assert [*folder.glob("turns/*/*")] == files


def test_the_folder_is_closed_to_others(new_writer, folder):
    folder.mkdir(mode=0o755)
    new_writer()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_old_days_are_deleted_also_after_the_clock_was_set_back(served, text, folder, policy_file):
    file, now = policy_file(retention_days=2), [1e9]
    with served(lambda context: [9, *text.end_tokens[:1]], file=file, clock=lambda: now[0]) as (server, writer):
        now[0] -= 100 * DAY
        server.ask([1, 2], "old")
        wait_until(lambda: writer.counts.written_turns == 1 and writer._expired == now[0])
        now[0] += 4 * DAY
        wait_until(lambda: TrafficFolder(folder).sessions() == [])


def test_a_foreign_folder_is_refused(new_writer, folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        new_writer()
    with pytest.raises(UserError, match="not a traffic folder"):
        TrafficFolder(folder)


def test_a_broken_frame_is_a_sentence(fill, folder):
    fill()
    (file,) = folder.glob("turns/*/*")
    file.write_bytes(file.read_bytes()[:-3] + b"xyz")
    with pytest.raises(UserError, match=r"at byte \d+ cannot be read"):
        TrafficFolder(folder).read("a2")
    file.unlink()
    with pytest.raises(UserError, match="is missing"):
        TrafficFolder(folder).read("a2")
