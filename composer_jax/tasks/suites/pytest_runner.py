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

# Options by which a repository's addopts would make the report incomplete: destination -> the value that it gets.
NEUTRAL = {
    "numprocesses": 0,  # pytest-xdist: its workers do not report to the plugin
    "distload": False,
    "tx": [],
    "looponfail": False,
    "no_cov": True,  # pytest-cov: low coverage changes the exit status
    "reruns": 0,  # pytest-rerunfailures: a phase is reported once
    "force_reruns": None,
    "stepwise": False,  # stops at the first failure
    "stepwise_skip": False,
    "stepwise_reset": False,
    "forked": False,  # pytest-forked
    "usepdb": False,  # waits for a person
    "randomly_seed": 0,  # pytest-randomly: the same order in every run
    "hypothesis_seed": "0",  # the same examples in every run
}

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
    before = fingerprint(order["files"])
    names = {function_of(test) for test in order["ids"] or ()}
    declared = {path: declarations(path, names, order["test_folders"]) for path in order["files"]}
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


def function_of(test):
    """Returns the name of the function in a test id."""
    return test.partition("[")[0].rpartition("::")[2]


def declarations(path, names, test_folders):
    """Returns {"functions": names in a test file, "xfail", "skip": names of those that mention such a mark}.

    A function mentions what it imports from a file in a test folder mentions. A mark outside functions, or in a
    conftest.py beside or above the file, may be one of any test: True. None for a file that is not Python.

    names: functions to tell of. test_folders: names of folders with tests.
    """
    folder, above = os.path.dirname(path), []
    while folder not in above:
        above.append(folder)
        folder = os.path.dirname(folder)
    try:
        functions, rest, imported = split_functions(read_text(path))
        texts = [read_text(os.path.join(folder, "conftest.py")) for folder in above]
        helpers = {name: helper_text(path, modules, level, test_folders) for name, (modules, level) in imported.items()}
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None

    def mentions(pattern, text):
        used = (helper for name, helper in helpers.items() if helper and re.search(rf"\b{re.escape(name)}\b", text))
        return bool(pattern.search(text)) or any(map(pattern.search, used))

    rest += "".join(texts)
    functions = {name: text for name, text in functions.items() if name in names}
    marks = {
        mark: mentions(pattern, rest) or sorted(name for name, text in functions.items() if mentions(pattern, text))
        for mark, pattern in MARKS.items()
    }
    return {"functions": sorted(functions), **marks}


def helper_text(path, modules, level, test_folders):
    """Returns the text of those of the modules that lie in a test folder, as a test file imports them."""
    folder = os.path.dirname(path)
    for _ in range(level - 1):
        folder = os.path.dirname(folder)
    texts = []
    for module in modules:
        file = module.replace(".", "/")
        places = (os.path.join(base, file) for base in ((folder,) if level else ("", folder)))
        files = [os.path.normpath(place + end) for place in places for end in (".py", "/__init__.py")]
        texts += [read_text(file) for file in dict.fromkeys(files) if {*file.split("/")} & {*test_folders}]
    return "\n".join(texts)


def read_text(path):
    """Returns the text of a file, "" if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def split_functions(text):
    """Returns function name -> source, with its decorators; the source outside functions and imports; and imported
    name -> (modules of which one has it, level of ast.ImportFrom)."""
    functions, rest, imported, nodes = {}, [], {}, list(ast.parse(text).body)
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions[node.name] = functions.get(node.name, "") + ast.unparse(node)
        elif isinstance(node, ast.ClassDef):
            nodes += node.body
            rest += [ast.unparse(part) for part in (*node.decorator_list, *node.bases, *node.keywords)]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:  # of a module, or a module of a package
                modules = [node.module, f"{node.module}.{alias.name}"] if node.module else [alias.name]
                imported[alias.asname or alias.name] = modules, node.level
        elif isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name.partition(".")[0]: ([alias.name], 0) for alias in node.names}
        else:
            rest.append(ast.unparse(node))
    return functions, "\n".join(rest), imported


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
        # Outermost, so that it sees what options such as -m and the conftest files have left.
        pytest.hookimpl(hookwrapper=True, tryfirst=True)(Witness.pytest_collection_modifyitems)
        pytest.hookimpl(hookwrapper=True)(Neutralizer.pytest_load_initial_conftests)
        pytest.hookimpl(hookwrapper=True)(Neutralizer.pytest_cmdline_main)
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
        cache = f"cache_dir={os.path.join(scratch, 'cache')}"
        options = ["-rfEs", "-o", cache, f"--junitxml={junit}", "--continue-on-collection-errors", "--maxfail=0"]
        arguments = [*with_cache(order["arguments"]), *options, *files]
        code = int(pytest.main(arguments, plugins=[*plugins, Neutralizer()]))
        plugins[0].ended(code)
    except (
        BaseException
    ):  # includes exceptions that tested code raises to escape; the log and the exit status show them
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def with_cache(arguments):
    """Returns the arguments without "-p no:cacheprovider", which makes pytest refuse addopts such as --failed-first."""
    kept = []
    for word in arguments:
        if word == "no:cacheprovider" and kept[-1:] == ["-p"]:
            kept.pop()
        else:
            kept.append(word)
    return kept


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
        yield
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
        """Returns relative paths; none for exceptions that do not end a test without a failure."""
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
        return sorted({*paths}) if paths or inner is None else self.files_through(inner)

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


class Neutralizer:
    """Plugin that gives the options in NEUTRAL their values, before any other plugin reads them.

    It also switches off the limits of hypothesis on time, which a right solution exceeds on a busy machine.
    """

    def pytest_load_initial_conftests(self, early_config):
        self.neutralize(early_config.known_args_namespace)
        yield

    def pytest_cmdline_main(self, config):
        self.neutralize(config.option)
        yield

    def pytest_sessionstart(self, session):
        if session.config.pluginmanager.hasplugin("hypothesispytest"):
            import hypothesis

            own = hypothesis.settings().suppress_health_check
            checks = [*own, hypothesis.HealthCheck.too_slow]
            timeless = hypothesis.settings(deadline=None, suppress_health_check=checks)
            hypothesis.settings.register_profile("composer", timeless)
            hypothesis.settings.load_profile("composer")

    def neutralize(self, options):
        for name, value in NEUTRAL.items():
            if hasattr(options, name):
                setattr(options, name, value)


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
