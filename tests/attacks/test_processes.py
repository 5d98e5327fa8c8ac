"""The worker, the host's processes, and commands that would outlive their end."""

import asyncio
import textwrap

import pytest

SIGNALS = {
    "every_number": "for number in range(1, 65): os.kill(1, number)",
    "kill_by_a_descriptor": "signal.pidfd_send_signal(os.pidfd_open(1), 9)",
    "stop_by_a_descriptor": "signal.pidfd_send_signal(os.pidfd_open(1), signal.SIGSTOP)",
    "its_group": "os.killpg(1, 9)",
    "by_a_pipe": "r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, 1); fcntl.fcntl(r, 10, 9); "
    "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')",
    "by_a_thread": "libc.syscall({'x86_64': 234, 'aarch64': 131}[platform.machine()], 1, 1, 9)",
    "queued": "libc.sigqueue(1, 9, None)",
    "by_a_timer": "libc.prctl(1, 9, 0, 0, 0); os.kill(os.getppid(), 9)",
    "everybody": "sys.stdout.flush(); os.kill(-1, 9)",
}
START = "import ctypes, errno, fcntl, os, platform, resource, signal, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"


@pytest.mark.parametrize("code", SIGNALS.values(), ids=SIGNALS)
def test_a_signal_to_the_worker(host, run_python, code):
    """run_python sees that the worker is alive afterwards."""
    result = run_python(f"{START}try:\n    {code}\nexcept OSError: pass\nprint('after', flush=True)")
    assert (result.outcome, result.stdout, result.stderr) == ("ok", "after\n", "")


@pytest.mark.parametrize("number", ["9", "signal.SIGSTOP", "signal.SIGTERM"])
def test_a_signal_to_a_process_of_the_host(host, attempt, number):
    assert attempt(f"os.kill({max(host.process.pid, 100)}, {number})") == "ESRCH"


STARVE = {
    "no_descriptors": ("resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))", "EPERM"),
    "no_time": ("resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))", "EPERM"),
    "nice": ("os.setpriority(os.PRIO_PROCESS, 1, 19)", "EPERM"),
    "nice_to_all_of_the_user": ("os.setpriority(os.PRIO_USER, 0, 19)", "EPERM"),
    "nice_to_its_group": ("os.setpriority(os.PRIO_PGRP, 1, 19)", "EPERM"),
    "one_processor": ("os.sched_setaffinity(1, {0})", "EPERM"),
    "idle": ("os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))", "EPERM"),
    "above_everybody": ("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))", "EPERM"),
    "unkind": ("os.setpriority(os.PRIO_PROCESS, 0, -20)", "EACCES"),
    "input_and_output_idle": ("syscall(251, 30, 1, 1, 3 << 13)", "EPERM"),
    "first_to_be_killed": ("os.open('/proc/1/oom_score_adj', os.O_WRONLY)", "EACCES"),
    "another_name": ("os.open('/proc/1/comm', os.O_WRONLY)", "EACCES"),
}


def test_starving_the_worker(attempts):
    """Whoever could break the worker would have the episode run again."""
    answers = attempts({name: body for name, (body, _) in STARVE.items()})
    assert answers == {name: error for name, (_, error) in STARVE.items()}


TRACE = {
    "attach": ("checked(libc.ptrace(16, 1, 0, 0))", "EPERM"),
    "seize": ("checked(libc.ptrace(0x4206, 1, 0, 0))", "EPERM"),
    "be_traced": ("checked(libc.ptrace(0, 0, 0, 0))", "EPERM"),
    "read_memory": ("syscall(310, 270, 1, bytes(16), 1, bytes(16), 1, 0)", "EPERM"),
    "write_memory": ("syscall(311, 271, 1, bytes(16), 1, bytes(16), 1, 0)", "EPERM"),
    "open_memory": ("os.open('/proc/1/mem', os.O_RDWR)", "EACCES"),
    "list_descriptors": ("os.listdir('/proc/1/fd')", "EACCES"),
    "take_a_descriptor": ("checked(libc.syscall(438, os.pidfd_open(1), 3, 0))", "EPERM"),
    "compare": ("syscall(312, 272, 1, os.getpid(), 0, 0, 0)", "EPERM"),
    "become_dumpable": ("open('/proc/1/coredump_filter', 'w')", "EACCES"),
}


def test_tracing_the_worker(attempts):
    answers = attempts({name: body for name, (body, _) in TRACE.items()})
    assert answers == {name: error for name, (_, error) in TRACE.items()}


FORGE = {
    "over_every_descriptor": "for fd in range(3, 4096):\n"
    "    try: os.write(fd, frame); print('WROTE', fd)\n    except OSError: pass",
    "over_every_socket_object": "import gc\nfor thing in gc.get_objects():\n    if isinstance(thing, socket.socket):\n"
    "        try: thing.sendall(frame); print('SENT')\n        except OSError: pass",
    "over_the_page_it_shares_with_the_worker": "import gc, mmap\nfor thing in gc.get_objects():\n"
    "    if isinstance(thing, mmap.mmap): thing[:len(frame)] = frame",
}  # fmt: skip


@pytest.mark.parametrize("code", FORGE.values(), ids=FORGE)
def test_forging_an_answer(host, run_python, code):
    """The worker's line to the host must not be in any command's hands."""
    start = """
    import json, os, socket, struct
    text = {"outcome": "ok", "exit_code": 0, "seconds": 0, "pieces": [0, 0, 0, 0], "dropped": [0, 0]}
    text = json.dumps(text).encode()
    frame = struct.pack("<II", len(text), 0) + text
    """
    result = run_python(f"{textwrap.dedent(start)}{code}\nraise SystemExit(5)")
    assert (result.outcome != "ok", result.exit_code in (5, 137), result.stdout) == (True, True, ""), result


DAEMON = """
import os, sys, time, signal
if os.fork(): {parent}
os.setsid()
if os.fork(): os._exit(0)
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
null = os.open(os.devnull, os.O_RDWR)
for fd in {fds}: os.dup2(null, fd)
while True:
    open("/tmp/beat", "a").write("x")
    open("/workspace/beat", "a").write("x")
    time.sleep(0.01)
"""


@pytest.mark.parametrize("parent", ["os._exit(0)", "time.sleep(60)"], ids=["parent_ends", "parent_stays"])
@pytest.mark.parametrize("fds", ["(0, 1, 2)", "()"], ids=["without_streams", "with_streams"])
def test_a_daemon_that_evades_the_end(host, pool, parent, fds):
    async def go():
        async with await pool.acquire({"d.py": DAEMON.format(parent=parent, fds=fds)}) as sandbox:
            result = await sandbox.run(["python", "d.py"], timeout_s=0.5)
            assert result.outcome == ("timeout" if "sleep" in parent else "ok") and result.seconds < 5
            look = "import os; print([p for p in os.listdir('/proc') if p.isdigit()])"
            after = await sandbox.run(["python", "-c", look])
            assert after.stdout.count("'") == 4  # the worker and the program itself

    asyncio.run(go())


EVASIONS = {
    "ignored_signals": "import signal\nfor n in range(1, 65):\n"
    "    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n",
    "blocked_signals": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n",
    "closed_streams": "import os\nos.closerange(0, 1000)\n",
    "stopped": "import os, signal\nif os.fork() == 0: os.kill(os.getppid(), signal.SIGCONT)\n"
    "os.kill(os.getpid(), signal.SIGSTOP)\n",
    "a_chain_of_programs": "import os, sys\nos.execv('/bin/sh', ['sh', '-c', 'exec sh -c \"exec sleep {trace}\"'])\n",
    "threads": "import threading, time\nfor _ in range(5): threading.Thread(target=time.sleep, args=(60,)).start()\n",
}  # fmt: skip


@pytest.mark.parametrize("code", EVASIONS.values(), ids=EVASIONS)
def test_evading_the_time_limit(host, run_python, trace, code):
    code = code.replace("{trace}", trace.text)
    result = run_python(f"{code}import time\ntime.sleep({trace.text})\n", timeout_s=0.3)
    assert result.outcome == "timeout" and 0.3 <= result.seconds < 3
    trace.wait_until_gone()


def test_evading_the_limit_of_processor_time(host, run_python):
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    code += "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass"
    assert run_python(code, timeout_s=6).outcome in ("timeout", "nonzero")


def test_processes_left_after_close(host, pool, trace):
    async def go():
        sandbox = await pool.acquire({})
        script = f"setsid sleep {trace.text} & nohup sleep {trace.text} & sleep {trace.text}"
        run = asyncio.create_task(sandbox.run(["sh", "-c", script]))
        await trace.wait_until_sleeping(3)
        await sandbox.close()
        await asyncio.wait([run])
        assert run.exception() is not None

    asyncio.run(go())
    trace.wait_until_gone()
