"""Runs pytest on a workspace and reports what every test did. Runs where the tests do; needs nothing but pytest.

Two processes. The referee (this one) never imports anything of the workspace, and no other process can look into it
or write to its output. It forks the process that becomes pytest, ends whatever that leaves running, and says on its
own standard output what it saw: the exit status, and two accounts of every test, which the judge compares: one that a
plugin of ours sent through a pipe while the tests ran, and pytest's JUnit XML.

Reads one JSON object from standard input:
    arguments   options for pytest
    files       test files to run; none: whatever pytest finds
    ids         of the tests to keep of them; null: all
    secret      text that the plugin puts into every line it sends
    decoys      how many tests that must fail are added, with made-up names, in the middle of the real ones
    tracer      source of a module with `plugin(say)`, another plugin, or null
Writes one line: base64 of zlib of a JSON object (see `main`). The suite's own output goes to the log in it.
"""

import sys

sys.path.pop(0)  # the workspace, or where this file is: nothing may be imported from there

import base64  # noqa: E402
import ctypes  # noqa: E402
import hashlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import select  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import tempfile  # noqa: E402
import traceback  # noqa: E402
import types  # noqa: E402
import xml.etree.ElementTree as ElementTree  # noqa: E402
import zlib  # noqa: E402

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
WATCHED = ("pytest", "_pytest", "pluggy", "unittest")
LOG_BYTES = 6000
MESSAGE_CHARACTERS = 300
INDEX = "composer_index"


def main():
    order = json.load(sys.stdin)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # nothing that is started below can slip away
    scratch = tempfile.mkdtemp()
    before = fingerprint(order["files"])
    lines, lines_end = os.pipe()
    log = os.open(os.path.join(scratch, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    pid = os.fork()
    if pid == 0:
        os.close(lines)
        become_pytest(order, scratch, lines_end, log)
    os.close(lines_end)
    os.close(log)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # hides memory and descriptors from processes of the same user
    said, status = listen(pid, lines)
    report = {
        "exit": os.waitstatus_to_exitcode(status),
        "lines": said.decode(errors="replace").splitlines(),
        "junit": read_junit(os.path.join(scratch, "junit.xml")),
        "rewritten": sorted(path for path, digest in fingerprint(order["files"]).items() if digest != before[path]),
        "log": tail(os.path.join(scratch, "log")),
    }
    shutil.rmtree(scratch, ignore_errors=True)
    packed = base64.b64encode(zlib.compress(json.dumps(report).encode(), 9))
    os.write(1, b"\n")
    while packed:
        packed = packed[os.write(1, packed) :]


def fingerprint(files):
    """Hash of each test file, so that one that the tested code rewrites is found out."""
    digests = {}
    for path in files:
        try:
            with open(path, "rb") as file:
                digests[path] = hashlib.sha256(file.read()).hexdigest()
        except OSError:
            digests[path] = None
    return digests


def listen(pid, lines):
    """(what came through the pipe, wait status), when the process and all that it started have ended."""
    end = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(lines, select.POLLIN)
    poll.register(end, select.POLLIN)
    said = bytearray()
    while end is not None:
        ready = [fd for fd, _ in poll.poll()]
        if lines in ready:
            data = os.read(lines, 1 << 16)
            said += data
            if not data:
                poll.unregister(lines)
        if end in ready:
            end = None
    status = os.waitpid(pid, 0)[1]
    end_children()
    while data := os.read(lines, 1 << 16):
        said += data
    return bytes(said), status


def end_children():
    """Kills what is left, orphans included: they became our children."""
    while True:
        for child in children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children():
    """Processes whose parent this one is. One that has ended stays listed until it is waited for."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = file.read().rpartition(b")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == os.getpid():
            found.append(int(name))
    return found


def tail(path):
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - LOG_BYTES))
        return file.read().decode(errors="replace")


def read_junit(path):
    """{"passed": indices of the tests that passed, once each, "tests": number of tests} or {"error": why not}."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seen = {}
    for case in root.iter("testcase"):
        bad = any(child.tag in ("failure", "error", "skipped") for child in case)
        indices = [entry.get("value") for entry in case.iter("property") if entry.get("name") == INDEX]
        for index in indices or [None]:
            seen.setdefault(index, []).append(not bad)
    passed = [int(index) for index, went in seen.items() if index is not None and went == [True]]
    return {"passed": sorted(passed), "tests": sum(map(len, seen.values()))}


def become_pytest(order, scratch, lines, log):
    """In the child: run pytest and leave. Everything of pytest is imported before the workspace can be."""
    code = 70
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in enumerate((null, log, log)):
            os.dup2(source, target)
        os.close(log)
        import pytest
        from _pytest.config import default_plugins

        for name in default_plugins:
            importlib.import_module(f"_pytest.{name}")
        pytest.hookimpl(tryfirst=True)(Witness.pytest_load_initial_conftests)
        plugins = [Witness(lines, order)]
        if order["tracer"] is not None:
            tracer = types.ModuleType("composer_tracer")
            exec(compile(order["tracer"], "composer_tracer", "exec"), tracer.__dict__)
            plugins.append(tracer.plugin(plugins[0].say))
        files = [path for path in order["files"] if os.path.exists(path)]
        if not files and order["files"]:
            raise FileNotFoundError("none of the test files is there")
        sys.path.insert(0, os.getcwd())
        sys.argv = ["pytest"]
        junit = os.path.join(scratch, "junit.xml")
        options = ["-p", "no:cacheprovider", f"--junitxml={junit}", "--continue-on-collection-errors", "--maxfail=0"]
        code = int(pytest.main([*order["arguments"], *options, *files], plugins=plugins))
        plugins[0].ended(code)
    except BaseException:  # also what tested code raises to get out; the log tells, the status says that it went wrong
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Witness:
    """Sends what happens through the pipe, keeps only the tests that were asked for, and adds the decoys."""

    def __init__(self, lines, order):
        # In cells of functions rather than in attributes: a little harder to come by.
        secret, write, functions = order["secret"], os.write, {}

        def say(**event):
            data = json.dumps({"secret": secret, **event}).encode() + b"\n"
            while data:
                data = data[write(lines, data) :]

        def changed():
            now = watched_functions()
            return sorted(name for name, function in functions.items() if now.get(name) is not function)

        self.say, self.changed, self.remember = say, changed, lambda: functions.update(watched_functions())
        self.decoys = order["decoys"]
        self.ids = None if order["ids"] is None else set(order["ids"])

    def pytest_load_initial_conftests(self):
        # Installed plugins are loaded and may have replaced some (hypothesis does); the workspace is not.
        self.remember()

    def pytest_collectreport(self, report):
        if report.failed:
            self.say(uncollected=report.nodeid, message=str(report.longrepr)[-2000:])

    def pytest_collection_modifyitems(self, session, config, items):
        if self.ids is not None:
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self.ids])
            items[:] = [item for item in items if item.nodeid in self.ids]
        self.add_decoys(items)
        for index, item in enumerate(items):
            item.user_properties.append((INDEX, str(index)))
        self.say(collected=[item.nodeid for item in items], decoys=[item.nodeid for item in items if is_decoy(item)])

    def add_decoys(self, items):
        """Each before the first test of a module: in the middle of a class it would end the class's fixtures."""
        import pytest

        modules, draw = {}, random.SystemRandom()
        for item in items:
            module = item.getparent(pytest.Module)
            if isinstance(item, pytest.Function) and type(module) is pytest.Module:
                modules.setdefault(module, []).append(item)
        for module in draw.sample(list(modules), min(self.decoys, len(modules))):
            name = f"{draw.choice(modules[module]).name.partition('[')[0]}_{draw.randrange(2, 100)}"
            decoy = pytest.Function.from_parent(module, name=name, callobj=must_fail)
            decoy.composer_is_decoy = True
            items.insert(items.index(modules[module][0]), decoy)

    def pytest_runtest_logreport(self, report):
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash is not None else str(report.longrepr or "")
        self.say(
            test=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            expected=hasattr(report, "wasxfail"),
            part=hasattr(report, "context"),  # one subtest of a test
            ms=round(1000 * report.duration),
            message=message[:MESSAGE_CHARACTERS],
        )

    def ended(self, code):
        self.say(ended=code, changed=self.changed())


def is_decoy(item):
    return getattr(item, "composer_is_decoy", False)


def must_fail():
    """A decoy's test."""
    value = random.SystemRandom().randrange(1, 100)
    assert value == -value


def watched_functions():
    """Name -> code of the functions and methods of pytest and unittest; replacing one is no way to repair code."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in WATCHED:
            continue
        owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
        for owner in owners:
            if owner is not module and owner.__module__ != name:
                continue
            for key, value in list(vars(owner).items()):
                function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                if isinstance(function, types.FunctionType):
                    found[f"{name}.{owner.__name__}.{key}"] = function.__code__
    return found


if __name__ == "__main__":
    main()
