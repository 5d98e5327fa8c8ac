"""The splits share words, but no combination of words."""

import re

import pytest

from composer_jax.demo import splits
from composer_jax.demo.splits import constants, draw_names, file_stems, function_names, is_heldout
from composer_jax.seeds import seeded_random
from tests.demo.generate import generate

TASKS = 800


def test_every_name_and_constant_belongs_to_exactly_one_side():
    for names in (function_names, file_stems):
        train, heldout = set(names("train")), set(names("heldout"))
        assert not train & heldout
        assert names("unseen") == names("heldout")
        assert 0.15 < len(heldout) / len(train | heldout) < 0.25
    train, heldout = set(constants("train", 2, 99)), set(constants("heldout", 2, 99))
    assert not train & heldout
    assert train | heldout == set(range(2, 100))
    assert 15 <= len(heldout) <= 25


def test_every_word_occurs_in_training():
    words = set("_".join((*function_names("train"), *file_stems("train"))).split("_"))
    groups = (splits.VERBS, splits.NOUNS, splits.ADJECTIVES, splits.THINGS)
    assert words == set().union(*groups)
    everything = [word for group in groups for word in group]
    assert len(everything) == len(set(everything)), "a word has one role only"


def test_the_split_never_moves():
    # A change here would let training see what earlier results were measured on.
    assert [c for c in range(2, 40) if is_heldout("constant", str(c))] == [4, 13, 19, 23, 25, 27, 31, 34]
    assert is_heldout("function", function_names("heldout")[0])
    assert function_names("heldout")[:3] == ("bind_area", "bind_edge", "bind_mail")


def pieces(task):
    """Function names, file names and drawn constants that occur in a task's modules, notes and instruction."""
    modules = {path: text for path, text in task.files.items() if path not in ("run_tests.py", "cases.json")}
    source = "\n".join(modules.values()) + task.instruction
    functions = set(re.findall(r"def (\w+)\(", source)) | {path.partition("/")[2] for path in modules if "/" in path}
    stems = {path.removesuffix(".py") for path in modules if "/" not in path}
    numbers = {int(n) for n in re.findall(r"\d+", source)} - {0, 1}
    return functions, stems, numbers


@pytest.mark.parametrize("family", ["bugfix", "two_bugs"])
def test_tasks_stay_on_their_side(family):
    for split, other in (("train", "heldout"), ("heldout", "train"), ("unseen", "train")):
        allowed = [set(function_names(split)), set(file_stems(split)), set(constants(split, 2, 99))]
        forbidden = [set(function_names(other)), set(file_stems(other)), set(constants(other, 2, 99))]
        for index in range(TASKS):
            task = generate(family, split, 7, index)
            for names, yes, no in zip(pieces(task), allowed, forbidden, strict=True):
                assert names <= yes and not names & no, (task.id, names)
            assert set(task.metadata["constants"]) <= allowed[2]


def code_and_comments(tasks):
    """The lines of all modules, those that an edit can put in place of a mistake, and what a note can say."""
    lines = set()
    for task in tasks:
        for path, text in task.files.items():
            if path.endswith(".py") and path != "run_tests.py":
                lines |= {line.strip() for line in text.split("\n")}
        for bug in task.metadata["bugs"]:
            lines |= {bug["new"], *bug["wrong"], *(f"# {claim}" for claim in bug["claims"].values())}
    return lines


@pytest.fixture(scope="module")
def seen():
    return code_and_comments(
        generate(kind, "train", 11, index) for kind in ("bugfix", "two_bugs", "three_bugs") for index in range(700)
    )


@pytest.mark.parametrize("family", ["bugfix", "one_bug", "two_bugs"])
def test_no_repair_and_no_specification_of_a_heldout_bug_occurs_in_training(seen, family):
    def bugs(split):
        """The repair of every bug, with its specification."""
        tasks = [generate(family, split, 12, index) for index in range(300)]
        return [{bug["new"], f"# {bug['claims'][bug['new']]}"} for task in tasks for bug in task.metadata["bugs"]]

    assert all(not lines & seen for lines in bugs("heldout"))
    trained = bugs("train")
    assert sum(lines <= seen for lines in trained) > len(trained) / 2, "other training tasks do repeat them"


def test_names_drawn_together_share_no_word():
    rng = seeded_random("a test")
    for _ in range(200):
        words = "_".join(draw_names(rng, function_names("heldout"), 4)).split("_")
        assert len(set(words)) == 8


def test_constants_outside_the_range_are_refused():
    with pytest.raises(ValueError, match="2..99"):
        constants("train", 1, 9)


def test_seeded_depends_on_its_parts_only():
    assert seeded_random("a", 1).random() == seeded_random("a", 1).random()
    assert seeded_random("a", 1).random() != seeded_random("a", 2).random()
