"""Checks the visible cases in cases.json: prints PASS and their number, or FAIL and the first wrong function."""

import importlib
import json
import sys


def passes(module, name, args, want):
    try:
        value = getattr(importlib.import_module(module), name)(*args)
    except BaseException:
        return False
    return type(value) is type(want) and value == want


def main():
    with open("cases.json") as file:
        cases = json.load(file)
    for case in cases:
        if not passes(*case):
            print("FAIL", case[1])
            return 1
    print("PASS", len(cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
