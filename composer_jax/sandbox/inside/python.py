"""`python ...` without the start of an interpreter: a fork of the worker runs the program.

The program sees what it would see in a new interpreter: argv, path, __main__, working folder, tracebacks, exit codes,
atexit, waiting for threads, and modules of the workspace that shadow the standard library. Other command lines (further
options, a program on standard input, folders and archives) start a real interpreter.
"""

import atexit
import builtins
import importlib.machinery
import io
import linecache
import os
import runpy
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from . import STARTUP_MODULES

PACKAGE = __name__.partition(".")[0]

_packages: list[str] = []


def add_packages(folder: str) -> None:
    """Adds a folder that programs can import from, also those in a real interpreter, and the programs in its `bin`."""
    _packages.append(folder)
    os.environ["COMPOSER_PACKAGES"] = folder  # read by site/packages.pth
    ours, _, others = os.environ["PATH"].partition(":")  # the first folder holds `python`
    os.environ["PATH"] = f"{ours}:{folder}/bin:{others}"


def can_fork(argv: list[str]) -> bool:
    """Whether a fork can run this command line."""
    if argv[0] not in ("python", "python3") or len(argv) < 2:
        return False
    first = argv[1]
    if first in ("-c", "-m"):
        return len(argv) > 2
    return not first.startswith("-") and not os.path.isdir(first) and not first.endswith((".zip", ".pyz"))


def run_program(argv: list[str], on_memory_error: Callable[[], None]) -> int:
    """Runs the program in this process and returns its exit code.

    Called after the fork, when descriptors 0 to 2, working folder and limits are set.
    """
    _open_streams()
    sys.orig_argv = list(argv)
    code = _guard(_program(argv), on_memory_error)
    # The part of interpreter shutdown that a program can notice. The functions are private, and have no public form.
    shutdown = threading._shutdown  # pyright: ignore[reportAttributeAccessIssue]
    for step in (shutdown, atexit._run_exitfuncs):
        try:
            step()
        except BaseException as error:
            _print(error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException as error:
            if stream is sys.stdout:
                code = 120  # Python's own code for it, whatever came before
                what = "on flushing sys.stdout:" if sys.version_info >= (3, 13) else f"in: {stream!r}"
                print(f"Exception ignored {what}\n{type(error).__name__}: {error}", file=sys.stderr)
    return code


def _program(argv: list[str]) -> Callable[[], None]:
    """Returns the program of a command line as a function; sets argv and path first, before anything can fail."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __spec__=None, __annotations__={})
    kind, rest = argv[1], argv[2:]
    if kind in ("-c", "-m"):
        sys.argv = [kind, *rest[1:]]
        folder = "" if kind == "-c" else os.getcwd()
    else:
        path = os.path.abspath(kind)
        sys.argv = [kind, *rest]
        folder = os.path.dirname(os.path.realpath(path))
        main.__dict__.update(__file__=path, __cached__=None)
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.path[:] = [folder, *sys.path, *_packages]
    _forget_shadowed(folder or ".")
    sys.modules["__main__"] = main
    if kind == "-m":
        run_module = runpy._run_module_as_main  # pyright: ignore[reportAttributeAccessIssue]  # private, as `-m` calls it
        return lambda: run_module(rest[0])
    if kind == "-c":
        if sys.version_info >= (3, 13):  # since 3.13, tracebacks show the lines of -c
            lines = rest[0].splitlines(keepends=True)
            linecache.cache["<string>"] = (len(rest[0]), None, lines, "<string>")
        return lambda: exec(compile(rest[0], "<string>", "exec", dont_inherit=True), main.__dict__)

    def script() -> None:
        try:
            with open(path, "rb") as file:
                source = file.read()
        except OSError as error:
            print(f"python: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
            raise SystemExit(2) from None
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)

    return script


def _guard(program: Callable[[], None], on_memory_error: Callable[[], None]) -> int:
    """Runs `program`; returns its exit code and prints what Python would print for the exception that ended it."""
    try:
        program()
        return 0
    except SystemExit as stop:
        if stop.code is None:
            return 0
        if isinstance(stop.code, int):
            return stop.code & 0xFF
        sys.stdout.flush()
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        if isinstance(error, MemoryError):
            on_memory_error()
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(f"{PACKAGE}."):
            trace = trace.tb_next
        error.__traceback__ = trace
        _print(error, trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def _print(error: BaseException, trace: types.TracebackType | None) -> None:
    try:
        sys.stdout.flush()
        sys.excepthook(type(error), error, trace)
    except BaseException:  # a broken sys.excepthook, or a full pipe
        try:
            traceback.print_exception(type(error), error, trace, file=sys.__stderr__)
        except BaseException:
            pass


def _open_streams() -> None:
    """Sets new sys.stdin, stdout and stderr over the descriptors, buffered as for pipes."""

    def stream(fd: int, name: str, mode: str, errors: str) -> io.TextIOWrapper:
        buffered: Any = open(fd, mode + "b", closefd=False)
        buffered.raw.name = f"<{name}>"
        text: Any = io.TextIOWrapper(buffered, encoding="utf-8", errors=errors, line_buffering=name == "stderr")
        text.mode = mode  # as an interpreter does; typeshed has it read-only
        return text

    sys.stdin = sys.__stdin__ = stream(0, "stdin", "r", "strict")
    sys.stdout = sys.__stdout__ = stream(1, "stdout", "w", "strict")
    sys.stderr = sys.__stderr__ = stream(2, "stderr", "w", "backslashreplace")


def _forget_shadowed(folder: str) -> None:
    """Unloads preloaded modules that the folder of the program replaces.

    Looks up the few names in the folder instead of the many in sys.modules: every object that a fork touches costs it a
    page.
    """
    try:
        own = {name.removesuffix(".py") for name in os.listdir(folder)}
    except OSError:
        return
    shadowed = {name for name in own if name in sys.modules and name not in STARTUP_MODULES}
    if shadowed:
        for name in list(sys.modules):
            if name.partition(".")[0] in shadowed:
                del sys.modules[name]
