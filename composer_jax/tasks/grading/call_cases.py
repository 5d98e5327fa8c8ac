"""Runs inside a grading sandbox beside a submission: calls functions and reports their return values.

Reads [[module, function, args], ...] from stdin; writes one JSON line per call, {"index", "value"} or {"index",
"error"}, as soon as the call returns. The process holds no expected values: a submission that takes it over must still
know the answers.
"""

import importlib
import json
import os
import sys

PLAIN = (type(None), bool, int, float, str)


def is_plain(value):
    """Whether a value has exact JSON types: a subclass could compare as one value and serialize as another."""
    if type(value) is list:
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    return type(value) in PLAIN


def outcome(module, function, args):
    try:
        value = getattr(importlib.import_module(module), function)(*args)
        return {"value": value} if is_plain(value) else {"error": f"returned a {type(value).__name__}"}
    except BaseException as error:  # SystemExit raised by a submission fails this case only
        return {"error": type(error).__name__}


def main():
    calls = json.load(sys.stdin)
    # The stdout of the submission becomes /dev/null: its prints must not mix with the report.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for index, call in enumerate(calls):
        report.write(json.dumps({"index": index, **outcome(*call)}) + "\n")
        report.flush()


if __name__ == "__main__":
    main()
