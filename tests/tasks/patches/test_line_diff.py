"""The difference of two texts, and versions of a text merged into one."""

from hypothesis import given
from hypothesis import strategies as st

from composer_jax.tasks.patches import diff_lines, merge_versions, split_lines

LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\r\n", "\n"]), max_size=12)


@given(LINES, LINES)
def test_the_hunks_turn_the_old_text_into_the_new(old, new):
    assert merge_versions(old, [new]) == "".join(new)
    assert merge_versions(old, [new, old]) == "".join(new)
    assert all(hunk.old or hunk.new for hunk in diff_lines(old, new))


@given(LINES, LINES, LINES)
def test_changes_on_two_sides_of_a_line_are_merged(old, before, after):
    middle = ["the middle\n"]
    first, second = [*before, *middle, *old], [*old, *middle, *after]
    assert merge_versions([*old, *middle, *old], [first, second]) == "".join([*before, *middle, *after])


@given(st.text(alphabet="a\r\n\u2028\x0c"))
def test_lines_joined_are_the_text(text):
    assert "".join(split_lines(text)) == text


def test_a_hunk_counts_its_lines_as_a_unified_diff_does():
    [replaced] = diff_lines(["a\n", "b\n"], ["a\n", "c\n"])
    [inserted] = diff_lines(["a\n", "b\n"], ["a\n", "new\n", "b\n"])
    assert (replaced.start, replaced.old_range) == (2, (1, 2))
    assert (inserted.start, inserted.old_range) == (1, (1, 1))
    assert merge_versions(["a\n", "b\n"], [["c\n", "b\n"], ["a\n", "c\n"]]) is None
