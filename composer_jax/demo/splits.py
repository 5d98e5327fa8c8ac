"""Splits of function names, file names and constants into training and held-out ones, by hash.

All splits share the words, because a model of a million parameters cannot spell a word that it never saw, but does
recombine words that it knows. The combinations are held out: a function is a (verb, noun) pair, a file an (adjective,
thing) pair, a constant an integer; the hash of its text decides.
"""

import hashlib
import random
from functools import cache

from composer_jax.tasks.task import Split

HELDOUT_PERCENT = 20
LARGEST_CONSTANT = 99

VERBS = tuple(
    "bind call cast clip copy draw drop emit fill find fold form get give hold join keep lift "
    "lock make mark mix move open pack pick pull push save scan send show shift sign skip sort "
    "spin take trim wrap".split()
)
NOUNS = tuple(
    "area band base bill card cell code data edge flow game goal grid heap host item job kit line "
    "mail mode node note page part path plan pool post queue row score shape slot table token "
    "user view word zone".split()
)
ADJECTIVES = tuple(
    "big blue bold calm cold dark deep dry fast flat free full green high late long low main neat "
    "pale pure red rich safe slow soft tall thin warm wild".split()
)
THINGS = tuple(
    "bell bird boat cake corn desk door drum farm fish flag frog gate goat hill lake lamp leaf "
    "moon nest pond rain ring road rock salt ship star tree wolf".split()
)


def is_heldout(kind: str, text: str) -> bool:
    """Returns whether `text` (a "verb_noun", an "adjective_thing", a decimal integer) is held out; never changes."""
    digest = hashlib.sha256(f"composer_jax split {kind} {text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELDOUT_PERCENT


@cache
def function_names(split: Split) -> tuple[str, ...]:
    """Returns all function names of a split. "unseen" is another kind of function and has the held-out names."""
    names = (f"{verb}_{noun}" for verb in VERBS for noun in NOUNS)
    return tuple(name for name in names if is_heldout("function", name) == (split != "train"))


@cache
def file_stems(split: Split) -> tuple[str, ...]:
    """Returns all file names of a split, without ".py"."""
    stems = (f"{adjective}_{thing}" for adjective in ADJECTIVES for thing in THINGS)
    return tuple(stem for stem in stems if is_heldout("file", stem) == (split != "train"))


@cache
def constants(split: Split, low: int, high: int) -> tuple[int, ...]:
    """Returns the integers of a split in low..high (both included; 2 <= low, high <= 99).

    0 and 1 are structure ("return 0", "range(x + 1)") and never drawn.
    """
    if not 2 <= low <= high <= LARGEST_CONSTANT:
        raise ValueError(f"constants are drawn from 2..{LARGEST_CONSTANT}, not from {low}..{high}")
    return tuple(c for c in range(low, high + 1) if is_heldout("constant", str(c)) == (split != "train"))


def draw_names(rng: random.Random, names: tuple[str, ...], count: int) -> list[str]:
    """Returns `count` names that share no word, so that a partial copy of one is never another."""
    chosen: list[str] = []
    used: set[str] = set()
    while len(chosen) < count:
        name = rng.choice(names)
        words = set(name.split("_"))
        if not words & used:
            chosen.append(name)
            used |= words
    return chosen
