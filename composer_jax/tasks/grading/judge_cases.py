"""Compares the values that call_cases.py reported with the expected ones, outside the sandbox of the submission.

Standard library only: this file runs in this process and in the container of an exported task.
"""

import json

_MISSING = object()


def failures(cases, report, outcome):
    """Returns one line for each case that does not pass.

    cases: dicts {"call": [module, function, args], "want": value}. report: the output of call_cases.py. outcome: how
    its run ended, for the cases without a value.
    """
    values, errors = read_report(report)
    lines = []
    for index, case in enumerate(cases):
        value = values.get(index, _MISSING)
        if value is _MISSING:
            problem = errors.get(index, f"no value ({outcome})")
        elif not same_value(value, case["want"]):
            problem = f"{repr(value)[:60]} instead of {case['want']!r}"
        else:
            continue
        module, function, args = case["call"]
        lines.append(f"{module}.{function}({', '.join(map(repr, args))}): {problem}")
    return lines


def read_report(report):
    """Returns index -> value and index -> error. Lines that the script would not write are ignored."""
    values, errors = {}, {}
    for line in report.split("\n"):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(entry, dict) or type(entry.get("index")) is not int:
            continue
        index = entry["index"]
        if index in values or index in errors:
            # The script reports each call once, so the submission wrote the second line.
            values.pop(index, None)
            errors[index] = "reported twice"
        elif "value" in entry:
            values[index] = entry["value"]
        else:
            errors[index] = str(entry.get("error"))[:60]
    return values, errors


def same_value(value, want):
    """Whether two JSON values are equal in value and type: True is not 1, and 1.0 is not 1."""
    if type(value) is not type(want):
        return False
    if isinstance(want, list):
        return len(value) == len(want) and all(map(same_value, value, want))
    if isinstance(want, dict):
        return value.keys() == want.keys() and all(same_value(value[key], want[key]) for key in want)
    return value == want
