"""Runs pytest on a workspace inside the sandbox and reports the outcome of every test. Needs nothing but pytest.

Two processes. The referee (this one) imports nothing from the workspace, and no other process can read its memory or
write to its output. It forks the process that becomes pytest, kills whatever that process leaves running, and reports
on its standard output: the exit status and two accounts of every test, which judge.py compares. Our plugin sends the
first account through a pipe while the tests run; the second is pytest's JUnit XML.

Reads one JSON object from standard input:
    arguments   options for pytest
    files       test files to run; empty: all that pytest collects
    ids         ids of the tests to keep; null: all
    prefixes    beginnings of the ids of further tests to keep
    secret      text that the plugin puts into every line it sends
    decoys      number of tests that must fail, with made-up names, inserted among the real ones
    tracer      source of a module with `plugin(say)`, another plugin, or null
Writes one line: base64 of zlib of a JSON object (see `main`). The object's "log" holds the suite's own output.
"""

import sys

sys.path.pop(0)  # the workspace or the folder of this file: nothing may be imported from either

import ast  # noqa: E402
import base64  # noqa: E402
import ctypes  # noqa: E402
import hashlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import re  # noqa: E402
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
MARKS = {"xfail": re.compile("xfail|expectedFailure"), "skip": re.compile("(?i)skip")}


def main():
    order = json.load(sys.stdin)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the pytest process become our children
    scratch = tempfile.mkdtemp()
    before, declared = fingerprint(order["files"]), {path: declarations(path) for path in order["files"]}
    lines, lines_end = os.pipe()
    log = os.open(os.path.join(scratch, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    pid = os.fork()
    if pid == 0:
        os.close(lines)
        become_pytest(order, scratch, lines_end, log)
    os.close(lines_end)
    os.close(log)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # hides memory and descriptors from processes of the same user
    received, status = listen(pid, lines)
    report = {
        "exit": os.waitstatus_to_exitcode(status),
        "lines": received.decode(errors="replace").splitlines(),
        "junit": read_junit(os.path.join(scratch, "junit.xml")),
        "declared": declared,
        "rewritten": sorted(path for path, digest in fingerprint(order["files"]).items() if digest != before[path]),
        "log": tail(os.path.join(scratch, "log")),
    }
    shutil.rmtree(scratch, ignore_errors=True)
    packed = base64.b64encode(zlib.compress(json.dumps(report).encode(), 9))
    os.write(1, b"\n")
    while packed:
        packed = packed[os.write(1, packed) :]


def fingerprint(files):
    """Returns path -> SHA-256 of each test file, None if unreadable. Tested code that rewrites one changes it."""
    digests = {}
    for path in files:
        try:
            with open(path, "rb") as file:
                digests[path] = hashlib.sha256(file.read()).hexdigest()
        except OSError:
            digests[path] = None
    return digests


def declarations(path):
    """Returns {"functions": names in a test file, "xfail", "skip": names of those that mention such a mark}.

    A mark outside functions, or in a conftest.py beside or above the file, may be one of any test: True. None for a
    file that is not Python.
    """
    folder, above = os.path.dirname(path), []
    while folder not in above:
        above.append(folder)
        folder = os.path.dirname(folder)
    try:
        functions, rest = split_functions(read_text(path))
        texts = [read_text(os.path.join(folder, "conftest.py")) for folder in above]
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    rest += "".join(texts)
    marks = {
        mark: bool(pattern.search(rest)) or sorted(name for name, text in functions.items() if pattern.search(text))
        for mark, pattern in MARKS.items()
    }
    return {"functions": sorted(functions), **marks}


def read_text(path):
    """Returns the text of a file, "" if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def split_functions(text):
    """Returns function name -> source, with its decorators, and the source outside functions and imports."""
    functions, rest, nodes = {}, [], list(ast.parse(text).body)
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions[node.name] = functions.get(node.name, "") + ast.unparse(node)
        elif isinstance(node, ast.ClassDef):
            nodes += node.body
            rest += [ast.unparse(part) for part in (*node.decorator_list, *node.bases, *node.keywords)]
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            rest.append(ast.unparse(node))
    return functions, "\n".join(rest)


def listen(pid, lines):
    """Returns (bytes received through the pipe, wait status) after the process and all its children have ended."""
    pid_fd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(lines, select.POLLIN)
    poll.register(pid_fd, select.POLLIN)
    received = bytearray()
    while pid_fd is not None:
        ready = [fd for fd, _ in poll.poll()]
        if lines in ready:
            data = os.read(lines, 1 << 16)
            received += data
            if not data:
                poll.unregister(lines)
        if pid_fd in ready:
            pid_fd = None
    status = os.waitpid(pid, 0)[1]
    kill_children()
    while data := os.read(lines, 1 << 16):
        received += data
    return bytes(received), status


def kill_children():
    """Kills all remaining children, which include the orphans of the pytest process."""
    while True:
        for child in child_pids():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def child_pids():
    """Returns the ids of our child processes. One that has ended stays listed until it is waited for."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = file.read().rpartition(b")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == os.getpid():
            pids.append(int(name))
    return pids


def tail(path):
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - LOG_BYTES))
        return file.read().decode(errors="replace")


def read_junit(path):
    """Returns {"clean": index -> number of skips} or {"error": reason}.

    clean: the tests that were reported once and without a failure.
    """
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    cases = {}
    for case in root.iter("testcase"):
        tags = [child.tag for child in case]
        skips = None if "failure" in tags or "error" in tags else tags.count("skipped")
        for entry in case.iter("property"):
            if entry.get("name") == INDEX:
                cases.setdefault(entry.get("value"), []).append(skips)
    return {"clean": {index: skips[0] for index, skips in cases.items() if len(skips) == 1 and skips[0] is not None}}


def become_pytest(order, scratch, lines, log):
    """Runs pytest in the child process and exits. All of pytest is imported before anything of the workspace."""
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
        pytest.hookimpl(hookwrapper=True)(Witness.pytest_runtest_makereport)
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
    except (
        BaseException
    ):  # includes exceptions that tested code raises to escape; the log and the exit status show them
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Witness:
    """Plugin that sends events through the pipe, deselects tests that were not requested, and adds the decoys."""

    def __init__(self, lines, order):
        # Closures instead of attributes: tested code finds them a little harder.
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
        self.prefixes = tuple(order["prefixes"])
        self.root = os.getcwd()

    def pytest_load_initial_conftests(self):
        # Installed plugins are loaded here and may have replaced functions (hypothesis does); the workspace is not.
        self.remember()

    def pytest_collectreport(self, report):
        if report.failed:
            self.say(uncollected=report.nodeid, message=str(report.longrepr)[-2000:])

    def pytest_collection_modifyitems(self, session, config, items):
        if self.ids is not None:
            kept, rest = [], []
            for item in items:
                is_kept = item.nodeid in self.ids or item.nodeid.startswith(self.prefixes)
                (kept if is_kept else rest).append(item)
            config.hook.pytest_deselected(items=rest)
            items[:] = kept
        decoys = self.add_decoys(items)
        for index, item in enumerate(items):
            item.user_properties.append((INDEX, str(index)))
        self.say(collected=[item.nodeid for item in items], decoys=[item.nodeid for item in items if item in decoys])

    def add_decoys(self, items):
        """Inserts each decoy before the first test of a module, where it ends no class's fixtures; returns them."""
        import pytest

        modules, decoys, draw = {}, [], random.SystemRandom()
        for item in items:
            module = item.getparent(pytest.Module)
            if isinstance(item, pytest.Function) and type(module) is pytest.Module:
                modules.setdefault(module, []).append(item)
        for module in draw.sample(list(modules), min(self.decoys, len(modules))):
            name = f"{draw.choice(modules[module]).name.partition('[')[0]}_{draw.randrange(2, 100)}"
            decoy = pytest.Function.from_parent(module, name=name, callobj=must_fail)
            decoys.append(decoy)
            items.insert(items.index(modules[module][0]), decoy)
        return decoys

    def pytest_runtest_makereport(self, item, call):
        """Adds to the report the files of the workspace through which a skip or an imperative xfail was raised."""
        waiting = getattr(item, "_excinfo", None)  # exceptions of unittest, of which pytest reports the first
        info = waiting[0] if waiting else call.excinfo
        outcome = yield
        outcome.get_result().composer_through = [] if info is None else self.files_through(info.value)

    def files_through(self, exception):
        """Returns relative paths, the outermost first; none for exceptions that do not end a test without a failure."""
        import unittest

        import pytest

        if not isinstance(exception, (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)):
            return []
        paths, trace = [], exception.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            # Compiled code can name any file as its own; its globals name the file of its module.
            for name in {frame.f_code.co_filename, str(frame.f_globals.get("__file__", ""))}:
                path = os.path.join(self.root, name)
                if name and os.path.commonpath([self.root, path]) == self.root:
                    paths.append(os.path.relpath(path, self.root))
            trace = trace.tb_next
        # pytest raises an exception of its own where it handles unittest's.
        inner = exception.__context__
        return paths if paths or inner is None else self.files_through(inner)

    def pytest_runtest_logreport(self, report):
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash is not None else str(report.longrepr or "")
        self.say(
            test=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            expected=hasattr(report, "wasxfail"),
            part=hasattr(report, "context"),  # one subtest of a test
            through=getattr(report, "composer_through", []),
            ms=round(1000 * report.duration),
            message=message[:MESSAGE_CHARACTERS],
        )

    def ended(self, code):
        self.say(ended=code, changed=self.changed())


def must_fail():
    """The test function of a decoy."""
    value = random.SystemRandom().randrange(1, 100)
    assert value == -value


def watched_functions():
    """Returns name -> code of the functions and methods of pytest and unittest. Replacing one is a forgery."""
    codes = {}
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
                    codes[f"{name}.{owner.__name__}.{key}"] = function.__code__
    return codes


if __name__ == "__main__":
    main()
