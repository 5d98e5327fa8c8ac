"""The benchmark of fleets in small: its parts run on the real wire, and it counts what kills make be sampled again."""

import json
import random
import subprocess
import sys

import pytest

from benchmarks.fleet import CONTRACT, PARTS, main, summarize
from benchmarks.fleet_kills import PROCESSES, Victims
from benchmarks.fleet_messages import MessageLog


def run_benchmark(rows, *parts):
    """Returns the rows that the benchmark has measured in small, and what it printed last."""
    command = [sys.executable, "-m", "benchmarks.fleet", "--size=smoke", f"--rows={rows}", f"--parts={','.join(parts)}"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not output.returncode, output.stderr[-3000:]
    return {row["part"]: row for row in json.loads(rows.read_text())}, json.loads(output.stdout.splitlines()[-1])


def test_engines_on_scripted_devices_and_the_bytes_of_a_message(tmp_path):
    by_part, printed = run_benchmark(tmp_path / "rows.json", "scheduler", "routes")
    assert by_part["scheduler"]["rounds"] >= 10 and by_part["scheduler"]["messages_per_round"] > 0
    routes = by_part["routes"]
    assert 1.0 < routes["engine_to_learner"] < 1.01 and routes["learner_to_worker"] < 1.01 and routes["journal"] < 1.01
    assert set(printed) == {name for names in CONTRACT.values() for name in names}
    assert printed["route_bytes_per_token"] == routes["route_bytes_per_token"] and printed["kills"] is None


@pytest.mark.slow
def test_messages_and_engines_of_scripted_speed(tmp_path):
    by_part, printed = run_benchmark(tmp_path / "rows.json", "router", "scaling")
    assert by_part["router"]["messages"] == 32 and printed["router_ms"] > 0
    assert 0 <= printed["engine_scaling"] <= 1.3, "no engine is faster than its script, apart from the window's ends"
    assert by_part["scaling"]["by_engines"].keys() == {"1", "2"}


def test_a_part_with_a_row_is_not_measured_again(tmp_path, monkeypatch, capsys):
    measured = []
    for part in ("routes", "kills"):
        monkeypatch.setitem(PARTS, part, lambda small, part=part: measured.append(part) or {"kills": 20, "lost": 1})
    for parts in ("routes", "kills,routes"):
        monkeypatch.setattr(sys, "argv", ["fleet", f"--parts={parts}", f"--rows={tmp_path / 'rows.json'}"])
        main()
    assert measured == ["routes", "kills"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["lost"] == 1


def test_every_number_is_that_of_a_part():
    assert CONTRACT.keys() == PARTS.keys()
    assert summarize([{"part": "kills", "kills": 20, "lost": 0, "steps": 12}]) == {
        **dict.fromkeys(name for names in CONTRACT.values() for name in names),
        "kills": 20,
        "lost": 0,
    }


def ask(log, engine, seed, branch, start, new_tokens, connection=0, *, opens=True, prompt_logprobs=False):
    """The frames of a message, of a session of its own."""
    if opens:
        log.note(engine, connection, True, {"call": 1, "method": "open", "body": {"seed": seed}}, 10)
        log.note(engine, connection, False, {"reply": 1, "body": {"session": 7, "max_model_len": 9}}, 10)
    body = {"session": 7, "branch": branch, "start": start, "params": {"prompt_logprobs": prompt_logprobs}}
    header = {"call": 2, "method": "sample", "body": body, "arrays": [["<i4", [new_tokens]]]}
    log.note(engine, connection, True, header, 10)


def test_a_message_that_is_asked_for_again_is_counted_after_the_kill_before_it():
    log = MessageLog()
    ask(log, "one", seed=5, branch=0, start=0, new_tokens=10)
    ask(log, "one", seed=5, branch=0, start=12, new_tokens=8, opens=False)
    ask(log, "two", seed=6, branch=0, start=0, new_tokens=20)
    ask(log, "two", seed=0, branch=0, start=0, new_tokens=20, connection=1, prompt_logprobs=True)
    assert len(log.asked) == 3 and not log.again
    log.kills = 1
    ask(log, "two", seed=5, branch=0, start=0, new_tokens=20, connection=2)  # elsewhere, with the whole context
    ask(log, "two", seed=5, branch=1, start=0, new_tokens=20, connection=2)
    assert log.again == {(1, 5): 1} and len(log.asked) == 4


def test_a_message_that_is_asked_for_again_belongs_to_the_kill_that_lost_it():
    log = MessageLog()
    for connection, end in enumerate(
        (lambda: log.note_end("one", 0), lambda: log.note("one", 1, True, {"cancel": 2}, 9))
    ):
        ask(log, "one", seed=5 + connection, branch=0, start=0, new_tokens=10, connection=connection)
        log.kills += 1
        end()
    log.kills += 1  # before the first is asked for again
    for connection in (2, 3):
        ask(log, "two", seed=3 + connection, branch=0, start=0, new_tokens=10, connection=connection)
    log.kills += 1
    log.note("two", 2, False, {"reply": 2, "body": {}}, 10)  # to a learner that was killed
    log.note_end("two", 2)
    log.kills += 1
    ask(log, "two", seed=5, branch=0, start=0, new_tokens=10, connection=4)
    assert log.again == {(1, 5): 1, (2, 6): 1, (4, 5): 1}


def test_a_message_is_owed_until_its_answer_its_cancellation_or_the_end_of_the_connection():
    log = MessageLog()
    for end in (
        lambda: log.note("one", 3, False, {"reply": 2, "body": {}}, 10),
        lambda: log.note("one", 3, True, {"cancel": 2}, 10),
        lambda: log.note_end("one", 3),
    ):
        ask(log, "one", seed=5, branch=0, start=0, new_tokens=10, connection=3)
        log.note("one", 4, False, {"reply": 2, "body": {}}, 10)  # another connection's
        log.note_end("two", 3)
        assert log.owes() and log.owes("one") and not log.owes("two")
        log.changed.clear()
        end()
        assert not log.owes() and log.changed.is_set()


def test_a_process_of_an_engine_is_killed_while_that_engine_owes_a_message():
    log, drawn = MessageLog(), []
    victims = Victims(random.Random(0), log)
    ask(log, "engine0", seed=5, branch=0, start=0, new_tokens=10)
    drawn += [victims.draw() for _ in range(8)]
    assert set(drawn) == PROCESSES.keys() - {"engine1", "second1"}
    ask(log, "engine1", seed=6, branch=0, start=0, new_tokens=10)
    drawn += [victims.draw() for _ in range(4)]
    assert {name: drawn.count(name) for name in PROCESSES} == dict.fromkeys(PROCESSES, 2), "the others catch up"
