"""The search that the grep tool runs inside a sandbox: `python -I -S -c <glob_pattern.py and this file> <request>`.

In isolated mode no module of the workspace or of the packages can replace one that is imported here. The time limit of
the command bounds a costly pattern. The request is JSON: pattern, path, glob ("" for all), ignore_case, context. Exit
code 0: some lines match; 1: none; 2: the pattern is invalid, with one sentence on stderr.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys

MAX_MATCHES = 100  # lines with a match that are shown
MAX_LINE = 300  # characters of a shown line
MAX_BYTES = 5 << 20  # a larger file is data
BINARY = 8192  # bytes; a zero byte in them marks a binary file
BATCH = 500  # files per ripgrep process
SKIPPED = (".git", ".hg", ".svn")


def main():
    request = json.loads(sys.argv[1])
    try:
        pattern = re.compile(request["pattern"], re.IGNORECASE if request["ignore_case"] else 0)
        problem = ""
    except (re.error, OverflowError, RecursionError) as error:
        pattern, problem = None, str(error)
    # glob_pattern.py, which defines compile_glob, stands before this file in the program.
    matches = compile_glob(request["glob"]) if request["glob"] else None  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    paths = list(_files(request["path"], matches))
    results = _with_ripgrep(paths, request["pattern"], request["ignore_case"])
    if results is None:
        if pattern is None:
            print(f"the pattern is no regular expression: {problem}", file=sys.stderr)
            return 2
        results = _with_python(paths, pattern)
    sys.stdout.reconfigure(errors="surrogateescape")  # pyright: ignore[reportAttributeAccessIssue]  # a TextIOWrapper
    return _print_matches(results, request["context"])


def _files(path, matches):
    """Relative paths of the text files in a folder, or of the one file, in order; links are not followed."""
    if not os.path.isdir(path or "."):
        yield from [path] if _is_text(path) else []
        return
    for folder, folders, names in os.walk(path or "."):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            file = os.path.normpath(os.path.join(folder, name))
            if (matches is None or matches(file)) and _is_text(file):
                yield file


def _open(path):
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening a pipe must not wait


def _is_text(path):
    try:
        with open(_open(path), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                return False
            return b"\0" not in file.read(BINARY)
    except OSError:  # a link, or not readable
        return False


def _lines(path):
    with open(_open(path), "rb") as file:
        text = file.read().decode(errors="replace").removeprefix("\ufeff")
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def _with_python(paths, pattern):
    """[(path, numbers of the matching lines), ...]"""
    results = []
    for path in paths:
        numbers = [number for number, line in enumerate(_lines(path), 1) if pattern.search(line)]
        if numbers:
            results.append((path, numbers))
    return results


def _with_ripgrep(paths, pattern, ignore_case):
    """As _with_python; None if there is no ripgrep, or if it does not support the pattern."""
    program = shutil.which("rg")
    if program is None:
        return None
    options = ["--no-config", "--no-messages", "--text", "--crlf", "--threads=2", "--color=never"]
    options += ["--no-heading", "--with-filename", "--null", "--line-number", "--max-columns=1"]
    options += ["--ignore-case"] if ignore_case else ["--case-sensitive"]
    numbers = {}
    for start in range(0, len(paths), BATCH):
        command = [program, *options, "--regexp", pattern, "--", *paths[start : start + BATCH]]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if done.returncode not in (0, 1):
            return None
        for line in done.stdout.split(b"\n"):
            path, zero, rest = line.partition(b"\0")
            if zero:
                numbers.setdefault(os.fsdecode(path), []).append(int(rest.partition(b":")[0]))
    return [(path, numbers[path]) for path in paths if path in numbers]


def _print_matches(results, context):
    """Prints path:number:line for a match, path-number-line around it, -- between separate groups."""
    total, left = sum(len(numbers) for _, numbers in results), MAX_MATCHES
    for path, numbers in results:
        if not left:
            break
        shown, lines = set(numbers[:left]), _lines(path)
        left -= len(shown)
        near = {n for number in shown for n in range(max(1, number - context), min(len(lines), number + context) + 1)}
        before = None
        for number in sorted(near):
            if context and number - 1 != before:
                print("--")
            before = number
            mark = ":" if number in shown else "-"
            print(f"{path}{mark}{number}{mark}{_cut(lines[number - 1])}")
    if not total:
        print("no match")
        return 1
    more = f"; shown are the first {MAX_MATCHES}" if total > MAX_MATCHES else ""
    print(f"[{total} lines match in {len(results)} files{more}]")
    return 0


def _cut(line):
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} [{len(line) - MAX_LINE} characters more]"


if __name__ == "__main__":
    sys.exit(main())
