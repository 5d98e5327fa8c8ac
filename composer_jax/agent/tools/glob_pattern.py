"""Glob patterns of paths. It imports the standard library only, because it also runs in sandboxes (see grep.py)."""

import fnmatch


def compile_glob(pattern):
    """A function that tells whether a relative path matches the pattern.

    `*`, `?` and `[...]` match characters of one name, `**` any number of folders, `{a,b}` either. A pattern without a
    slash is matched with the name alone, in every folder. The time is proportional to pattern times path.
    Raises ValueError for a pattern with more than 64 alternatives.
    """
    patterns = [["**", one] if "/" not in one else one.strip("/").split("/") for one in _alternatives(pattern)]
    return lambda path: any(_matches(path.split("/"), parts) for parts in patterns)


def _matches(names, parts):
    """Whether the names of a path match the parts of a pattern. places[i]: whether the first i names match so far."""
    places = [True] + [False] * len(names)
    for part in parts:
        if part == "**":
            first = places.index(True) if True in places else len(places)
            places = [i >= first for i in range(len(places))]
        else:
            places = [False] + [places[i] and fnmatch.fnmatchcase(name, part) for i, name in enumerate(names)]
    return places[-1]


def _alternatives(pattern):
    """The patterns that `{a,b}` expands to, innermost braces first."""
    done, rest = [], [pattern]
    while rest:
        one = rest.pop()
        close = one.find("}")
        open_ = one.rfind("{", 0, max(close, 0))
        if open_ < 0:
            done.append(one)
            continue
        rest += [one[:open_] + choice + one[close + 1 :] for choice in one[open_ + 1 : close].split(",")]
        if len(rest) + len(done) > 64:
            raise ValueError("the pattern has more than 64 alternatives")
    return done
