"""Checks the visible cases in cases.json: prints PASS and their number, or FAIL and the first wrong value."""

import importlib
import json
import sys


def failure(module, name, args, want):
    try:
        value = getattr(importlib.import_module(module), name)(*args)
    except BaseException as error:
        return f"{type(error).__name__}, want {want!r}"
    if type(value) is not type(want) or value != want:
        return f"{repr(value)[:60]}, want {want!r}"
    return None


def main():
    with open("cases.json") as file:
        cases = json.load(file)
    for case in cases:
        problem = failure(*case)
        if problem:
            print("FAIL", problem)
            return 1
    print("PASS", len(cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
