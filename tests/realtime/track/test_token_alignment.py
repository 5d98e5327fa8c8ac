"""Lines that are found again: random histories against the truth, formatters, moves, and texts that are hard."""

import random

import pytest

from composer_jax.realtime.track.agent_diff import diff_file, hunk_hashes, measure, reason_to_leave_out
from composer_jax.realtime.track.token_alignment import ABSENT, TokenizedText, align, find_moved, free_tokens
from tests.realtime.track.line_history import History, flat, formatted


def measured(history: History, seed: int) -> tuple[int, int, int, int]:
    diff = diff_file("a.py", [flat(history.before), flat(history.after)], ["session"])
    survival = measure(diff, formatted(history.later, random.Random(seed)))
    return len(diff.added), sum(survival.added_kept), len(diff.deleted), sum(survival.deleted_kept)


def test_five_hundred_random_histories_are_measured_as_they_were():
    lost = 0
    for seed in range(500):
        history = History(random.Random(seed), duplicates=False)
        history.play()
        assert measured(history, seed) == history.truth(), seed
        lost += history.truth()[0] - history.truth()[1]
    assert lost > 400


def test_equal_lines_are_confused_in_few_histories():
    """Where lines are equal, the text does not say which of them was deleted, and the counts may differ by a few."""
    differences = lines = 0
    for seed in range(500):
        history = History(random.Random(seed), duplicates=True)
        history.play()
        truth = history.truth()
        lines += truth[0] + truth[2]
        differences += sum(abs(one - other) for one, other in zip(measured(history, seed), truth, strict=True))
    assert 0 < differences < 0.02 * lines


def kept(old: str, new: str) -> list[bool]:
    return [start != ABSENT for start in align(TokenizedText(old), TokenizedText(new))]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("f(a,\n  b,\n  c)\n", "f(a, b, c)\n", [True] * 3),
        ("f(a, b, c)\n", "f(\n    a,\n    b,\n    c,\n)\n", [True]),
        ("x = 'it'\n", 'x = ("it")\n', [True]),
        ("return x\n", "return x + 1\n", [False]),
        ("return x + 1\n", "return x\n", [False]),
        ("x = 1\n", "if y:\n    x = 1; z = 2\n", [False]),
        ("x == 1\n", "x != 1\n", [False]),
        ("a\nb\nc\n", "f(a, b, c, d)\n", [False, True, False]),
        ("one two\nthree four\n", "one two three\nfour five\n", [True, False]),
        ("}\n}\n", "}\n", [True, False]),
        ("", "x\n", []),
        ("x\n", "", [False]),
    ],
)
def test_a_line_is_its_tokens(old, new, expected):
    assert kept(old, new) == expected


def test_the_alignment_keeps_as_many_lines_as_possible():
    """Compared with the longest common subsequence by the table of all prefixes."""
    for seed in range(200):
        chance = random.Random(seed)
        old, new = ([chance.choice("abcdefg") for _ in range(chance.randint(0, 12))] for _ in range(2))
        lengths = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
        for i in range(len(old)):
            for j in range(len(new)):
                best = max(lengths[i][j + 1], lengths[i + 1][j])
                lengths[i + 1][j + 1] = lengths[i][j] + 1 if old[i] == new[j] else best
        found = sum(kept("\n".join(old), "\n".join(new)))
        # Lines that occur once in both are aligned first, as in patience diff, which can cost others.
        assert found <= lengths[-1][-1]
        if max((old + new).count(letter) for letter in "abcdefg") and not set(old) & set(new):
            assert found == 0
        if not any(old.count(letter) == new.count(letter) == 1 for letter in set(old)):
            assert found == lengths[-1][-1], (old, new)


def test_a_block_that_moved_is_found_and_a_short_line_is_not():
    function = "def compute_total(values):\n    return sum(values)\n"
    old = TokenizedText(f"{function}pass\nfirst = 1\nsecond = 2\nthird = 3\n")
    new = TokenizedText(f"first = 1\nsecond = 2\nthird = 3\npass\n{function}")
    starts = align(old, new)
    assert [start != ABSENT for start in starts] == [False, False, False, True, True, True]
    moved = find_moved(old, new, starts, free_tokens(old, new, starts), range(6))
    assert [start != ABSENT for start in moved] == [True, True, False, True, True, True]
    assert [start != ABSENT for start in find_moved(old, new, starts, free_tokens(old, new, starts), [])] == [
        start != ABSENT for start in starts
    ]


def test_what_the_session_itself_moved_is_lost_where_it_is_moved_back():
    block = "first_name = call(one)\nsecond_name = call(two)\n"
    others = "".join(f"other_{index} = {index}\n" for index in range(5))
    diff = diff_file("a.py", [block + others, others + block], ["session"])
    assert (len(diff.added), len(diff.deleted)) == (2, 2)
    assert measure(diff, others + block).added_kept == (True, True)
    back = measure(diff, block + others)
    assert (back.added_kept, back.deleted_kept) == ((False, False), (False, False))


def test_thousands_of_equal_lines_are_counted():
    table = "0, 1\n" * 3000
    head, tail = "start = 1\n", "end = 1\n"
    diff = diff_file("a.py", [head + tail, head + table + tail], ["session"])
    assert len(diff.added) == 3000
    survival = measure(diff, "new = 1\n" + "0, 1\n" * 2000 + "other = 2\n")
    assert sum(survival.added_kept) == 2000


class CountedTokens(list):
    """Tokens that count how many of them are read."""

    reads = 0

    def __getitem__(self, index):
        tokens = super().__getitem__(index)
        self.reads += len(tokens) if isinstance(index, slice) else 1
        return tokens


@pytest.mark.parametrize("row", ["row {0} {1}\n", "row {0} {1} {2}\n"])
def test_rewritten_rows_are_aligned_in_linear_time(row):
    """Rows that begin with the same token, all of one length, or of as many as there are rows."""
    old, new = (
        TokenizedText("".join(row.format(i, change * i + 1, "x " * i) for i in range(600))) for change in (7, 11)
    )
    new.tokens = CountedTokens(new.tokens)
    starts = align(old, new)
    moved = find_moved(old, new, starts, free_tokens(old, new, starts), range(600))
    assert [line for line, start in enumerate(moved) if start != ABSENT] == [0]
    assert new.tokens.reads < 20 * len(new.tokens)


def test_only_the_sessions_lines_are_its_own():
    versions = ["a = 1\n", "a = 1\nb = 2\n", "b = 2\nc = 3\n", "b = 2\nc = 3\nd = 4\n", "c = 3\nd = 4\ne = 5\n"]
    diff = diff_file("a.py", versions, ["session", "other", "nobody", "unclear"])
    assert (diff.added, diff.deleted, diff.foreign, diff.unclear) == ((), (), (0, 2), 1)
    assert measure(diff, versions[-1]).others_kept == (True,)


def test_hashes_of_hunks_depend_on_the_secret_and_say_nothing_of_the_file_around():
    diff = diff_file("a.py", ["a = 1\nb = 2\n", "a = 2\nb = 2\nc = 3\n"], ["session"])
    other = diff_file("a.py", ["a = 1\nb = 7\n", "a = 2\nb = 7\nc = 3\n"], ["session"])
    assert len(hunk_hashes(diff, "x")) == 2 and hunk_hashes(diff, "x") == hunk_hashes(other, "x")
    assert not set(hunk_hashes(diff, "x")) & set(hunk_hashes(diff, "y"))


@pytest.mark.parametrize(
    "path", ["src/locks.py", "generated_by_hand/a.py", "building/map.py", "a/lockfile", "regenerated.py", "min.js.py"]
)
def test_names_that_only_look_generated_are_measured(path):
    assert reason_to_leave_out(path, [b"x = 1\n"]) is None
