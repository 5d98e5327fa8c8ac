"""Which lines of a text are still in a later one: an alignment by tokens, which formatters do not disturb.

A line is its tokens: words, and every other character but whitespace and those that formatters add and remove
(quotes, commas, semicolons, parentheses, backslashes). A line is in the later text if its tokens stand there without
interruption, in order with the other lines, and if each of its ends is the end of a line or touches the neighbouring
line of the earlier text. So a line may be indented, split or joined to its neighbours, and is still the same; one with
a changed, inserted or appended token is not.

Lines are aligned as by patience diff: common beginnings and ends, then lines that occur once in both texts, then, in
the gaps between them, the chain of most lines (a longest common subsequence by the method of Hunt and Szymanski, 1977).
"""

from __future__ import annotations

import bisect
import collections
import itertools
import re
from collections.abc import Collection, Iterable, Sequence

_LINE_END = re.compile(r"\r\n|\n|\r")
_TOKEN = re.compile(r"\w+|[^\w\s()',;\"`\\]")
ABSENT = -1
MOVED_CHARACTERS = 20
"""Letters and digits of the smallest block of lines that counts as moved; the bound of git diff --color-moved."""
MAX_PAIRS = 500_000
"""Places of the lines of one gap above which equal lines are counted, without regard to their order."""
MAX_READS = 200
"""How often a token of a text may be read to find lines that begin within a line; above it, only whole ones are."""
MAX_PLACES = 100
"""Places at which a moved block is looked for."""


class TokenizedText:
    """The lines of a text that have tokens.

    Attributes:
      tokens: all tokens of the text.
      lines: for each line with tokens, the range [start, end) of its tokens.
      keys: for each such line, its tokens.
      has_word: for each such line, whether it has a letter or digit.
    """

    def __init__(self, text: str):
        self.tokens: list[str] = []
        self.lines: list[tuple[int, int]] = []
        self.keys: list[tuple[str, ...]] = []
        for line in _LINE_END.split(text):
            if key := tuple(_TOKEN.findall(line)):
                self.lines.append((len(self.tokens), len(self.tokens) + len(key)))
                self.tokens += key
                self.keys.append(key)
        self.has_word = [any(_is_word(token) for token in key) for key in self.keys]


def align(old: TokenizedText, new: TokenizedText) -> list[int]:
    """Returns where each line of `old` begins in `new.tokens`, increasing, or ABSENT."""
    starts = [ABSENT] * len(old.lines)
    gaps = [(0, len(old.lines), 0, len(new.lines))]
    edges = _Edges(new)
    while gaps:
        first, last, new_first, new_last = gaps.pop()
        while first < last and new_first < new_last and old.keys[first] == new.keys[new_first]:
            starts[first] = new.lines[new_first][0]
            first, new_first = first + 1, new_first + 1
        while first < last and new_first < new_last and old.keys[last - 1] == new.keys[new_last - 1]:
            last, new_last = last - 1, new_last - 1
            starts[last] = new.lines[new_last][0]
        if first == last or new_first == new_last:
            continue
        if anchors := _anchors(old, new, range(first, last), range(new_first, new_last)):
            ends = [(first - 1, new_first - 1), *anchors, (last, new_last)]
            for (old_before, new_before), (old_after, new_after) in itertools.pairwise(ends):
                gaps.append((old_before + 1, old_after, new_before + 1, new_after))
            for line, new_line in anchors:
                starts[line] = new.lines[new_line][0]
            continue
        tokens = range(new.lines[new_first][0], new.lines[new_last - 1][1])
        _align_gap(old, range(first, last), new.tokens, tokens, edges, starts)
    _drop_unbounded(old, starts, edges)
    return starts


def align_between(
    old: TokenizedText, new: TokenizedText, fixed: Sequence[int], is_free: Sequence[bool], lines: Iterable[int]
) -> list[int]:
    """Returns where each of `lines` of `old` begins in `new.tokens`, between its fixed neighbours, or ABSENT.

    fixed: where each line of `old` is known to begin in `new.tokens`, increasing, or ABSENT.
    is_free: for each token of `new`, whether a line may be found there.
    """
    starts, edges = list(fixed), _Edges(new, is_free)
    tokens = [token if free else "" for token, free in zip(new.tokens, is_free, strict=True)]
    wanted = set(lines)
    low, gap = 0, []
    for line in range(len(old.lines) + 1):
        if line < len(old.lines) and fixed[line] == ABSENT:
            gap += [line] if line in wanted else []
            continue
        high = fixed[line] if line < len(old.lines) else len(tokens)
        if gap and low < high:
            _align_gap(old, gap, tokens, range(low, high), edges, starts)
        if line < len(old.lines):
            low, gap = fixed[line] + len(old.keys[line]), []
    _drop_unbounded(old, starts, edges)
    return [starts[line] if line in wanted else ABSENT for line in range(len(starts))]


def find_moved(
    old: TokenizedText,
    new: TokenizedText,
    starts: Sequence[int],
    is_free: Sequence[bool],
    movable: Collection[int],
) -> list[int]:
    """Returns `starts` with the lines of `old` that stand elsewhere in `new`, in blocks of MOVED_CHARACTERS.

    A block is lines of `old` that follow each other; it begins and ends with lines of `new`.
    is_free: for each token of `new`, whether a line may be found there.
    movable: the lines that may have moved.
    """
    starts, is_free = list(starts), list(is_free)
    edges = _Edges(new)
    lost = {old.keys[line] for line in movable if starts[line] == ABSENT}
    places = {
        key: [place for place in places if place in edges.begins][:MAX_PLACES]
        for key, places in _find_places(lost, new.tokens, range(len(new.tokens)), edges).items()
    }
    line = 0
    while line < len(starts):
        best: tuple[int, int, int] = (MOVED_CHARACTERS - 1, line, 0)
        if starts[line] == ABSENT and line in movable:
            for place in places[old.keys[line]]:
                last, characters = _moved_block(old, new, starts, movable, line, place, is_free, edges.ends)
                best = max(best, (characters, last, place), key=lambda block: block[0])
        _, last, place = best
        for moved in range(line, last):
            starts[moved] = place
            is_free[place : place + len(old.keys[moved])] = [False] * len(old.keys[moved])
            place += len(old.keys[moved])
        line = max(last, line + 1)
    return starts


def free_tokens(old: TokenizedText, new: TokenizedText, starts: Sequence[int]) -> list[bool]:
    """Returns for each token of `new` whether no line of `old` is aligned with it."""
    is_free = [True] * len(new.tokens)
    for start, key in zip(starts, old.keys, strict=True):
        if start != ABSENT:
            is_free[start : start + len(key)] = [False] * len(key)
    return is_free


class _Edges:
    """Where lines of a text begin and end; a token that is not free ends the line before it and begins one after it."""

    def __init__(self, text: TokenizedText, is_free: Sequence[bool] | None = None):
        self.begins = {begin for begin, _ in text.lines}
        self.ends = {end for _, end in text.lines}
        for place, free in enumerate(is_free or ()):
            if not free:
                self.begins.add(place + 1)
                self.ends.add(place)


def _is_word(token: str) -> bool:
    return token[0] == "_" or token[0].isalnum()


def _anchors(old: TokenizedText, new: TokenizedText, lines: range, new_lines: range) -> list[tuple[int, int]]:
    """The longest increasing list of (line, new line) that are equal and occur once in each range."""
    counts = collections.Counter(old.keys[line] for line in lines)
    new_counts = collections.Counter(new.keys[line] for line in new_lines)
    where = {new.keys[line]: line for line in new_lines}
    pairs = [
        (line, where[old.keys[line]])
        for line in lines
        if old.has_word[line] and counts[old.keys[line]] == 1 and new_counts[old.keys[line]] == 1
    ]
    tails: list[int] = []  # of the best list of each length, the last new line
    best: list[int] = []  # of the best list of each length, the last pair
    before: list[int] = []
    for index, (_, new_line) in enumerate(pairs):
        length = bisect.bisect_left(tails, new_line)
        before.append(best[length - 1] if length else ABSENT)
        tails[length : length + 1], best[length : length + 1] = [new_line], [index]
    chain, index = [], best[-1] if best else ABSENT
    while index != ABSENT:
        chain.append(pairs[index])
        index = before[index]
    return chain[::-1]


def _align_gap(
    old: TokenizedText, lines: Sequence[int], tokens: Sequence[str], within: range, edges: _Edges, starts: list[int]
) -> None:
    """Sets `starts` of `lines` to the chain of most lines in tokens[within]."""
    places = _find_places({old.keys[line] for line in lines}, tokens, within, edges)
    if sum(len(places[old.keys[line]]) for line in lines) > MAX_PAIRS:
        unused = {key: iter(where) for key, where in places.items()}
        for line in lines:
            starts[line] = next(unused[old.keys[line]], ABSENT)
        return
    best = _PrefixMaximum(len(within) + 1)
    chains: list[tuple[int, int, int]] = []  # line, start, index of the chain before
    for line in lines:
        key = old.keys[line]
        extended = []
        for place in places[key]:
            is_whole = place in edges.begins and place + len(key) in edges.ends
            worth, before = best.up_to(place - within.start)
            # Most lines with a word; among these, whole lines, and then more tokens.
            worth += (len(key) + (20_000 if is_whole else 10_000)) if old.has_word[line] else 1
            extended.append((place - within.start + len(key), worth, len(chains)))
            chains.append((line, place, before))
        for end, worth, index in extended:
            best.raise_at(end, worth, index)
    _, index = best.up_to(len(within))
    while index != ABSENT:
        line, starts[line], index = chains[index]


def _find_places(
    keys: Collection[tuple[str, ...]], tokens: Sequence[str], within: range, edges: _Edges
) -> dict[tuple[str, ...], list[int]]:
    """Where each key stands in tokens[within], increasing; if that would read too much, only where it is a line."""
    places: dict[tuple[str, ...], list[int]] = {key: [] for key in keys}
    lengths = collections.defaultdict(set)
    for key in keys:
        lengths[key[0]].add(len(key))
    sums = {token: sum(numbers) for token, numbers in lengths.items()}
    if sum(sums.get(tokens[place], 0) for place in within) > MAX_READS * len(within):
        inside = range(within.start + 1, within.stop)
        ends = (place for place in inside if place in edges.begins or place in edges.ends)
        windows = itertools.pairwise((within.start, *ends, within.stop))
    else:
        windows = ((place, place + length) for place in within for length in lengths.get(tokens[place], ()))
    for place, end in windows:
        if end <= within.stop and (key := tuple(tokens[place:end])) in places:
            places[key].append(place)
    return places


class _PrefixMaximum:
    """A Fenwick tree of (value, index): the greatest value at or before a position."""

    def __init__(self, size: int):
        self._tree = [(0, ABSENT)] * (size + 1)

    def up_to(self, position: int) -> tuple[int, int]:
        best, position = (0, ABSENT), position + 1
        while position:
            best = max(best, self._tree[position], key=lambda entry: entry[0])
            position &= position - 1
        return best

    def raise_at(self, position: int, value: int, index: int) -> None:
        position += 1
        while position < len(self._tree):
            if self._tree[position][0] < value:
                self._tree[position] = (value, index)
            position += position & -position


def _drop_unbounded(old: TokenizedText, starts: list[int], edges: _Edges) -> None:
    """Makes ABSENT the lines of which an end is within a line of the new text and touches no neighbour."""
    bounded = []
    for line, start in enumerate(starts):
        end = start + len(old.keys[line])
        touches_before = line > 0 and starts[line - 1] != ABSENT and starts[line - 1] + len(old.keys[line - 1]) == start
        touches_after = line + 1 < len(starts) and starts[line + 1] == end
        bounded.append((start in edges.begins or touches_before) and (end in edges.ends or touches_after))
    for line, is_bounded in enumerate(bounded):
        if not is_bounded:
            starts[line] = ABSENT


def _moved_block(
    old: TokenizedText,
    new: TokenizedText,
    starts: Sequence[int],
    movable: Collection[int],
    line: int,
    place: int,
    is_free: Sequence[bool],
    ends: Collection[int],
) -> tuple[int, int]:
    """(line after the block that stands at `place`, letters and digits of the block)."""
    last, characters, here = line, 0, 0
    for index in range(line, len(starts)):
        key = old.keys[index]
        until = place + len(key)
        if starts[index] != ABSENT or (index not in movable and old.has_word[index]):
            break
        if tuple(new.tokens[place:until]) != key or not all(is_free[place:until]):
            break
        here += sum(len(token) for token in key if _is_word(token))
        place = until
        if place in ends:
            last, characters = index + 1, here
    return last, characters
