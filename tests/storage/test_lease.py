"""The lease on a bucket folder, with a clock that only moves when somebody waits."""

import json
import subprocess
import sys
import time

import pytest

from composer_jax.errors import UserError
from composer_jax.storage import lease as lease_module
from composer_jax.storage.bucket import BucketFolder
from composer_jax.storage.lease import LEASE_S, NAME, RENEW_S, Lease, require_holder, this_process


class Clock:
    """Time that passes in `sleep` only; `events` are called when their time has come."""

    def __init__(self):
        self.now, self.events = 0.0, []

    def at(self, moment, event):
        self.events.append((moment, event))

    def sleep(self, seconds):
        self.now += seconds
        due = [entry for entry in self.events if entry[0] <= self.now]
        self.events = [entry for entry in self.events if entry[0] > self.now]
        for _, event in due:
            event()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def new_lease(of_process):
    """(host, pid) -> a Lease of a process there, on one folder."""

    def make(host, pid=7):
        return of_process({"host": host, "pid": pid, "machine": host, "started": 1})

    return make


@pytest.fixture
def of_process(bucket_url, clock):
    """What identifies a process -> a Lease of it, on one folder."""

    def make(process):
        return Lease(
            BucketFolder(bucket_url),
            monotonic=lambda: clock.now,
            sleep=clock.sleep,
            process=process,
            renew_in_background=False,
        )

    return make


def test_a_second_process_is_refused_when_the_first_one_renews(new_lease, clock):
    first, second = new_lease("a"), new_lease("b", pid=8)
    first.acquire()
    clock.at(RENEW_S, first.renew)
    with pytest.raises(UserError, match="is in use by process 7 on a; wait for it or choose another --workdir"):
        second.acquire()
    assert clock.now < RENEW_S + 5
    first.require()  # it has noticed nothing


def test_the_lease_of_a_dead_process_runs_out(new_lease, clock, capfd):
    new_lease("a").acquire()  # and is never renewed
    second = new_lease("b")
    second.acquire()
    assert LEASE_S <= clock.now < LEASE_S + 5
    assert "was in use by process 7 on a; waiting up to 60 s" in capfd.readouterr().err
    second.require()


def test_a_lease_that_was_given_back_is_free_at_once(new_lease, clock):
    first = new_lease("a")
    first.acquire()
    first.release()
    new_lease("b").acquire()
    assert clock.now == 0


def test_a_process_that_slept_through_its_lease_ends(new_lease, clock):
    first, second = new_lease("a"), new_lease("b", pid=8)
    first.acquire()
    second.acquire()
    with pytest.raises(UserError, match="has been taken over by process 8 on b, because this process did not renew"):
        first.require()
    assert not first.held
    first.release()
    second.renew()
    second.require()  # nothing was taken from it


def test_of_two_that_wait_for_a_dead_process_one_gets_the_lease(new_lease, clock):
    new_lease("a").acquire()
    second, third = new_lease("b", pid=8), new_lease("c", pid=9)
    clock.at(LEASE_S - 1, lambda: second._take(second._folder.read(NAME)[1]))  # a little earlier
    with pytest.raises(UserError, match="is in use by process 8 on b"):
        third.acquire()


def test_a_renewal_that_the_network_swallows_is_tried_again(new_lease, clock, monkeypatch):
    first = new_lease("a")
    first.acquire()
    monkeypatch.setattr(first._folder, "write", lambda *_: (_ for _ in ()).throw(UserError("cannot be reached")))
    clock.now = LEASE_S / 4
    first.require()  # the last renewal is young enough
    clock.now = LEASE_S
    with pytest.raises(UserError, match="cannot be reached"):
        first.require()
    monkeypatch.undo()
    first.require()  # nobody took it meanwhile


def test_on_one_machine_a_dead_process_is_recognised_at_once(of_process, clock):
    here = this_process()
    if not here["machine"]:
        pytest.skip("this system has no /proc")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = here | {"pid": child.pid, "started": lease_module._start_time(child.pid)}
    of_process(theirs).acquire()
    with pytest.raises(UserError, match=f"is in use by process {child.pid} on"):
        of_process(here).acquire()
    child.kill()
    child.wait()
    of_process(here).acquire()
    assert clock.now == 0
    # A number that another process has got meanwhile is not the process of the lease.
    assert lease_module.is_alive_here(here | {"started": 0}, here) is False
    assert lease_module.is_alive_here(here | {"machine": "elsewhere"}, here) is None


def test_a_thread_renews_the_lease(bucket_url, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_S", 0.01)
    lease, folder = Lease(BucketFolder(bucket_url)), BucketFolder(bucket_url)
    lease.acquire()
    deadline = time.monotonic() + 20
    while json.loads(folder.read(NAME)[0])["renewals"] < 2:
        assert time.monotonic() < deadline
    lease.release()
    assert folder.read(NAME) is None


def test_other_processes_of_a_run_verify_the_holder(new_lease, bucket_url):
    first, folder = new_lease("a"), BucketFolder(bucket_url)
    with pytest.raises(UserError, match="is not the folder that process 0 works in"):
        require_holder(folder, first.token)
    first.acquire()
    require_holder(folder, first.token)
    with pytest.raises(UserError, match="give every process the same --workdir"):
        require_holder(folder, "another")
