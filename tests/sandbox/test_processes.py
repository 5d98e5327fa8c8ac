"""Killing the descendants of a process, while one of them ends and its children become those of another one."""

import signal

import pytest

from composer_jax.sandbox.inside import processes

WORKER, SHELL, JOB = 1, 2, 3


class Ending:
    """A worker with a shell and its background job. The shell has been killed, and ends while it is listed: its job
    becomes a child of the worker after the worker's children were read, before those of the shell are."""

    def __init__(self):
        self.children = {WORKER: [SHELL], SHELL: [JOB], JOB: []}
        self.states = {SHELL: "R", JOB: "S"}
        self.listings = 0

    def list(self, pid):
        found = list(self.children[pid])
        if pid == WORKER:
            self.listings += 1
            self.states[SHELL] = "Z"
            self.children = {WORKER: [SHELL, JOB], SHELL: [], JOB: []}
        return found

    def kill(self, pid, number):
        assert number == signal.SIGKILL
        self.states[pid] = "Z"


@pytest.fixture
def table(monkeypatch):
    made = Ending()
    monkeypatch.setattr(processes, "_children", made.list)
    monkeypatch.setattr(processes, "_state", lambda pid: made.states[pid])
    monkeypatch.setattr(processes, "send_signal", made.kill)
    return made


def test_the_job_of_a_shell_that_ends_meanwhile_is_killed(table):
    assert processes.running_descendants(WORKER) == [], "one listing misses it"
    table.__init__()
    processes.kill_descendants(WORKER)
    assert table.states == {SHELL: "Z", JOB: "Z"} and table.listings < 6


def test_a_process_that_does_not_die_does_not_hold_up_the_caller(table, monkeypatch):
    monkeypatch.setattr(processes, "send_signal", lambda pid, number: None)
    processes.kill_descendants(WORKER, most=7)
    assert table.listings == 7
