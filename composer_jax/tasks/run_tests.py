"""Checks the visible cases in cases.json: prints PASS and their number, or the first failure, in one line."""

import importlib
import json
import sys


def failure(module, name, args, want):
    shown = f"{name}({', '.join(map(repr, args))})"
    try:
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:
        return f"import {type(error).__name__}"
    try:
        value = function(*args)
    except BaseException as error:
        return f"{shown} {type(error).__name__}"
    if type(value) is not type(want) or value != want:
        return f"{shown} is {repr(value)[:60]}, want {want!r}"
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
