"""Pools: limits on their size, crashes, ends, users."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from composer_jax.sandbox import LocalSandboxPool, SandboxDied, SandboxFileError
from composer_jax.sandbox.inside import frames
from tests.sandbox.fixtures import REPOSITORY, as_another_user, zygote_of


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_never_more_than_size_in_use():
    pool = LocalSandboxPool(size=3)
    in_use, most = 0, 0

    async def episode(i, all_three):
        nonlocal in_use, most
        async with await pool.acquire({"i": str(i)}) as sandbox:
            in_use += 1
            most = max(most, in_use)
            if i < 3:
                await all_three.wait()
            result = await sandbox.run(["python", "-c", "print(open('i').read())"])
            in_use -= 1
            return result.stdout

    async def go():
        all_three = asyncio.Barrier(3)
        return await asyncio.gather(*(episode(i, all_three) for i in range(8)))

    try:
        for _ in range(2):  # a second event loop on the same pool
            assert asyncio.run(go()) == [f"{i}\n" for i in range(8)]
        assert most == 3
    finally:
        pool.kill()


def test_a_start_whose_answer_comes_with_its_timeout_is_a_death(monkeypatch):
    async def receive(sandbox, loop):
        sandbox.end("no answer within 60 s")  # what the alarm calls, while the answer is among the next events
        return {}, b""

    async def go():
        async with LocalSandboxPool(size=1) as pool:
            sandbox = await pool.acquire({})
            monkeypatch.setattr(sandbox, "_receive", lambda loop: receive(sandbox, loop))
            with pytest.raises(SandboxDied, match="no answer within 60 s"):
                await sandbox.wait_ready(60)

    asyncio.run(go())


def test_waiting_can_be_cancelled():
    async def go():
        async with LocalSandboxPool(size=1) as pool:
            first = await pool.acquire({})
            waiting = [asyncio.create_task(pool.acquire({})) for _ in range(3)]
            await asyncio.sleep(0.05)
            waiting[0].cancel()
            await first.close()
            second = await waiting[1]
            await second.close()
            await (await waiting[2]).close()
            await first.close()  # again: no effect

    asyncio.run(go())


def test_a_caller_that_is_cancelled_as_it_gets_a_place_passes_it_on(monkeypatch):
    async def go():
        async with LocalSandboxPool(size=1) as pool:
            first = await pool.acquire({})
            waiting = [asyncio.create_task(pool.acquire({})) for _ in range(2)]
            await asyncio.sleep(0)
            wake = pool._wake_next

            def wake_and_cancel():
                wake()
                waiting[0].cancel()  # it has its place, and has not run since

            monkeypatch.setattr(pool, "_wake_next", wake_and_cancel)
            await first.close()
            await (await asyncio.wait_for(waiting[1], 60)).close()
            assert waiting[0].cancelled()

    asyncio.run(go())


def test_two_sandboxes_share_nothing(pool):
    async def go():
        one, two = await pool.acquire({"a": "1"}), await pool.acquire({})
        code = "import socket, time\nopen('/tmp/x', 'w').write('x'); open('/dev/shm/y', 'w').write('y')\n"
        code += "s = socket.socket(socket.AF_UNIX); s.bind('\\0name'); s.listen(); time.sleep(1)"
        running = asyncio.create_task(one.run(["python", "-c", code]))
        await asyncio.sleep(0.3)
        look = "import os, socket\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'), os.listdir('.'))\n"
        look += "print([p for p in os.listdir('/proc') if p.isdigit()])\n"
        look += "socket.socket(socket.AF_UNIX).connect('\\0name')"
        result = await two.run(["python", "-c", look])
        assert result.stdout == "[] [] []\n['1', '2']\n" and "ConnectionRefusedError" in result.stderr
        assert (await running).outcome == "ok"
        await one.close()
        await two.close()

    asyncio.run(go())


def test_what_a_command_leaves_in_tmp_stays_for_the_next(pool):
    async def go():
        async with await pool.acquire({}) as sandbox:
            await sandbox.run(["python", "-c", "open('/tmp/x', 'w').write('kept')"])
            return await sandbox.run(["cat", "/tmp/x"])

    assert asyncio.run(go()).stdout == "kept"


def test_files_that_cannot_be_written_do_not_cost_a_sandbox():
    pool = LocalSandboxPool(size=1)

    async def go():
        for _ in range(3):
            with pytest.raises(SandboxFileError, match="outside the workspace"):
                await pool.acquire({"../x": ""})
        await (await pool.acquire({})).close()

    try:
        asyncio.run(go())
    finally:
        pool.kill()


def test_a_killed_worker_is_an_infrastructure_error(pool, trace):
    async def go():
        sandbox = await pool.acquire({})
        running = asyncio.create_task(sandbox.run(["sleep", trace.text]))
        (command,) = await trace.wait_until_sleeping()
        worker = parent_of(command)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(SandboxDied):
            await running
        with pytest.raises(SandboxDied):
            await sandbox.list()
        trace.wait_until_gone()
        await sandbox.close()
        await (await pool.acquire({})).close()

    asyncio.run(go())


def test_a_worker_that_ended_between_two_requests_says_why(pool):
    async def go():
        sandbox = await pool.acquire({"a": "b"})
        with sandbox._channel:  # its worker ends with it
            sandbox._channel, worker = socket.socketpair()
        sandbox._channel.setblocking(False)
        with worker:
            worker.sendall(frames.pack({"broken": "MemoryError: no room"}))
        with pytest.raises(SandboxDied, match="MemoryError: no room"):
            await sandbox.list()

    asyncio.run(go())


def test_sandboxes_that_died_before_they_were_used_are_replaced():
    """Such as by a process of the same user that kills everybody, where the kernel cannot confine signals."""
    pool = LocalSandboxPool(size=4)

    async def go():
        used = await pool.acquire({})
        for warm in pool._warm:
            assert select.select([warm._channel], [], [], 30)[0]  # it has written that it is ready
        ends = select.poll()
        for sandbox in (used, *pool._warm):
            ends.register(sandbox._channel, select.POLLRDHUP)
        children = Path("/proc/{0}/task/{0}/children".format(zygote_of(pool)))
        deadline = time.monotonic() + 30
        while len(ends.poll(0)) < 4:
            assert time.monotonic() < deadline
            for child in children.read_text().split():  # workers, and at first what started them, which ends by itself
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        await used.close()
        for files in ({}, {"a": "b"}):
            async with await pool.acquire(files) as sandbox:
                assert await sandbox.list() == list(files)

    try:
        asyncio.run(go())
    finally:
        pool.kill()


def test_a_killed_zygote_is_replaced():
    pool = LocalSandboxPool(size=2)

    async def go():
        sandbox = await pool.acquire({})
        os.kill(zygote_of(pool), signal.SIGKILL)
        with pytest.raises(SandboxDied):
            for _ in range(100):
                await sandbox.list()
                await asyncio.sleep(0.02)
        await sandbox.close()
        for _ in range(3):
            async with await pool.acquire({"a": "b"}) as other:
                assert await other.read("a") == b"b"

    try:
        asyncio.run(go())
    finally:
        pool.kill()


def test_a_sandbox_that_does_not_answer_dies(pool, monkeypatch, trace):
    monkeypatch.setattr("composer_jax.sandbox.local_sandbox.GRACE_S", 0.0)

    async def go():
        sandbox = await pool.acquire({})
        await sandbox.shell(f"sleep {trace.text} &")
        (job,) = await trace.wait_until_sleeping()
        worker = parent_of(parent_of(job))
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(SandboxDied, match="no answer"):
            await sandbox.run(["true"], timeout_s=0.1)
        trace.wait_until_gone()

    asyncio.run(go())


def test_close_leaves_nothing(trace):
    pool = LocalSandboxPool(size=4)
    zygote = zygote_of(pool)

    async def go():
        busy = await pool.acquire({})
        running = asyncio.create_task(busy.run(["sleep", trace.text]))
        await trace.wait_until_sleeping()
        started = time.monotonic()
        await pool.close()
        with pytest.raises(SandboxDied, match="closed"):
            await running
        assert time.monotonic() - started < 3
        with pytest.raises(RuntimeError, match="closed"):
            await pool.acquire({})

    asyncio.run(go())
    trace.wait_until_gone()
    assert not Path(f"/proc/{zygote}").exists()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise SystemExit"])
def test_nothing_outlives_its_owner(end, trace, tmp_path):
    code = f"""
    import asyncio, os, threading
    from pathlib import Path
    from composer_jax.sandbox import LocalSandboxPool
    async def main():
        pool = await asyncio.to_thread(LocalSandboxPool, size=2)  # the thread that starts it does not last either
        sandbox = await pool.acquire({{}}, pool.tree(Path("launch")))
        task = asyncio.create_task(sandbox.run(["sleep", "{trace.text}"]))
        await asyncio.sleep(0.5)
        print("started", flush=True)
        {end}
    asyncio.run(main())
    """
    script = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.run(script, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    assert owner.stdout == "started\n", owner.stderr
    trace.wait_until_gone()
    deadline = time.monotonic() + 10
    while left := list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_the_thread_that_made_the_pool_may_end():
    async def go():
        pool = await asyncio.to_thread(LocalSandboxPool, size=1)
        await asyncio.get_running_loop().shutdown_default_executor()
        await asyncio.sleep(0.2)
        async with pool, await pool.acquire({}) as sandbox:
            assert (await sandbox.run(["true"])).outcome == "ok"

    asyncio.run(go())


AS_ANOTHER_USER = """
import asyncio, os, pathlib, sys, tempfile
from composer_jax.sandbox import LocalSandboxPool
assert os.getuid() == int(sys.argv[1]) and os.geteuid() != 0
secret = "/tmp/secret-of-" + sys.argv[1]
open(secret, "w").write("x")
async def main():
    async with LocalSandboxPool(size=3) as pool, await pool.acquire({"a.py": "print(6 * 7)"}) as sandbox:
        assert (await sandbox.run(["python", "a.py"])).stdout == "42\\n"
        for attack in (f"open({secret!r})", "import os; os.kill(1, 9); os.setuid(0)", "open('/usr/x', 'w')"):
            result = await sandbox.run(["python", "-c", attack])
            assert result.outcome == "nonzero", (attack, result)
        bomb = "import os, time\\nn = 0\\ntry:\\n  while n < 5000:\\n    if os.fork() == 0: time.sleep(5)\\n"
        result = await sandbox.run(["python", "-c", bomb + "    n += 1\\nexcept OSError: print(n)"])
        assert 0 < int(result.stdout) < 100, result
        folder = tempfile.mkdtemp()
        pathlib.Path(folder, "theirs.py").write_text("print('pristine')")
        async with await pool.acquire({}, pool.tree(pathlib.Path(folder))) as sandbox:
            await sandbox.write("theirs.py", "print('changed')")
            async with await sandbox.fork() as other:
                result = await other.run(["sh", "-c", "python theirs.py; rm theirs.py; ls"])
                assert result.stdout == "changed\\n", result
    assert open(secret).read() == "x"
    print("as", os.getuid())
asyncio.run(main())
"""


def test_as_another_user():
    uid = os.getuid() or 60_999
    assert as_another_user(AS_ANOTHER_USER) == f"as {uid}\n"
