"""Files that a starting Python runs, modules that shadow others, programs that break their interpreter."""

import asyncio
import sys

import pytest

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
HOOK = "import sys; sys.stdout.write('HOOKED')"
COMMANDS = {
    "by_the_fork": ["python", "p.py"],
    "by_the_fork_as_text": ["python", "-c", "import json; print(json.dumps(1))"],
    "by_a_real_start": ["sh", "-c", "exec python p.py"],
}
HOOKS = ("sitecustomize.py", "usercustomize.py", "site.py", "hook.pth", "pyvenv.cfg", "python._pth", "os.py",
         "codecs.py", "encodings/__init__.py", "io.py", "__main__.py", "__init__.py", "frames.py",
         "worker.py")  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_in_the_workspace(host, pool, name):
    async def go():
        async with await pool.acquire({name: HOOK, "p.py": "import json; print(json.dumps(1))"}) as sandbox:
            for command in COMMANDS.values():
                result = await sandbox.run(command)
                assert (result.stdout, result.stderr) == ("1\n", ""), command
                assert sorted(await sandbox.list()) == sorted([name, "p.py"])

    asyncio.run(go())


OUTSIDE = {
    "user_site_customize": f"/tmp/.local/lib/{VERSION}/site-packages/usercustomize.py",
    "user_site_path": f"/tmp/.local/lib/{VERSION}/site-packages/hook.pth",
    "profile": "/tmp/.bashrc",
    "profile_of_a_login": "/tmp/.profile",
    "startup_of_the_prompt": "/tmp/.pythonrc.py",
}


@pytest.mark.parametrize("path", OUTSIDE.values(), ids=OUTSIDE)
def test_a_hook_in_the_home_folder(host, pool, path):
    """It is the author's own affair while it lasts, but nothing of it is in a snapshot or a fork."""
    hook = HOOK if "python" in path else "echo HOOKED"

    async def go():
        async with await pool.acquire({"p.py": "print(1)"}) as sandbox:
            code = f"import os; os.makedirs(os.path.dirname({path!r}), exist_ok=True)\n"
            code += f"open({path!r}, 'w').write({hook!r})"
            assert (await sandbox.run(["python", "-c", code])).outcome == "ok"
            assert (await sandbox.run(["python", "p.py"])).stdout == "1\n"
            assert (await sandbox.run(["test", "-e", path])).outcome == "ok"
            async with await sandbox.fork() as fork:
                for each in (fork, sandbox):
                    result = await each.run(["bash", "-lc", "python p.py; python - < p.py"])
                    assert "HOOKED" not in result.stdout and result.stdout.endswith("1\n1\n")
                    assert (await each.run(["test", "-e", path])).outcome == "nonzero"

    asyncio.run(go())


CHANGES_IN_PLACE = {
    "environment": "os.environ['PYTHONSTARTUP'] = os.environ['PYTHONPATH'] = '/workspace'",
    "environment_by_putenv": "os.putenv('PYTHONINSPECT', '1'); os.putenv('LD_PRELOAD', '/workspace/x.so')",
    "builtins": "import builtins; builtins.print = builtins.open = builtins.len = None",
    "modules": "import json, time; json.dumps = time.monotonic = os.fork = os.kill = lambda *a, **k: 1 / 0",
    "no_modules": "sys.modules.clear()",
    "import_hooks": "sys.meta_path.insert(0, None); sys.path_hooks.clear(); sys.path[:] = ['/workspace']",
    "trace": "sys.settrace(lambda *a: 1 / 0); sys.setprofile(lambda *a: 1 / 0)",
    "exit_handlers": "import atexit; atexit.register(lambda: 1 / 0); sys.excepthook = None",
    "collector": "import gc; gc.disable(); gc.unfreeze(); [x.clear() for x in gc.get_objects() if type(x) is list]",
    "recursion": "sys.setrecursionlimit(10**9); f = lambda: f(); f()",
    "crash": "import ctypes; ctypes.string_at(0)",
    "abort": "os.abort()",
    "exit_without_a_word": "os._exit(7)",
    "folder": "os.chdir('/tmp'); os.rmdir('/workspace/own')",
    "mask": "os.umask(0o777); import signal; signal.pthread_sigmask(0, range(1, 65))",
    "no_streams": "sys.stdout.close(); sys.stderr.close(); os.closerange(0, 1000)",
    "threads_that_never_end": "import threading; threading.Thread(target=lambda: os._exit(9)).start(); time = 1",
}


@pytest.mark.parametrize("code", CHANGES_IN_PLACE.values(), ids=CHANGES_IN_PLACE)
def test_a_program_that_changes_its_interpreter(host, pool, code):
    """What a command does to the forked interpreter stays in that fork."""
    check = "import json, os, sys, time; print(json.dumps(sorted(os.environ)), os.umask(0o22), time.monotonic() > 0)"

    async def go():
        async with await pool.acquire({"own/x": "x"}) as sandbox:
            before = await sandbox.run(["python", "-c", check])
            await sandbox.run(["python", "-c", f"import os, sys\nprint('ran', flush=True)\n{code}"], timeout_s=1)
            after = await sandbox.run(["python", "-c", check])
            assert (before.outcome, before.stdout, before.stderr) == (after.outcome, after.stdout, "")
            assert before.stdout.endswith(" 18 True\n")

    asyncio.run(go())


EXITS = {
    "at_import": {"p.py": "import mine; print('after')", "mine.py": "import sys; sys.exit(0)"},
    "at_import_of_a_shadow": {"p.py": "import json; print('after')", "json.py": "raise SystemExit"},
    "without_cleaning_up": {"p.py": "import mine; print('after')", "mine.py": "import os; os._exit(0)"},
    "by_a_handler": {"p.py": "import atexit, os; atexit.register(os._exit, 0); raise AssertionError"},
}


@pytest.mark.parametrize("files", EXITS.values(), ids=EXITS)
def test_an_exit_that_pretends_success(host, pool, files):
    """The exit code can be pretended, what would have been printed afterwards cannot."""

    async def go():
        async with await pool.acquire(files) as sandbox:
            result = await sandbox.run(["python", "p.py"])
            assert result.outcome == "ok" and "after" not in result.stdout
            assert (await sandbox.run(["python", "-c", "print('alive')"])).stdout == "alive\n"

    asyncio.run(go())


def test_a_module_that_shadows_one_of_the_worker_is_the_programs_own(host, pool):
    files = {
        "inside/__init__.py": "value = 'mine'",
        "json.py": "value = 'my json'",
        "p.py": "import inside, json; print(inside.value, json.value)",
    }

    async def go():
        async with await pool.acquire(files) as sandbox:
            result = await sandbox.run(["python", "p.py"])
            assert (result.stdout, result.stderr) == ("mine my json\n", "")

    asyncio.run(go())
