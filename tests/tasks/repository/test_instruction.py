"""The instruction of a task: what it shows and what it hides."""

from composer_jax.tasks.grader import PYTEST
from composer_jax.tasks.repository.candidate import make_candidate
from composer_jax.tasks.repository.instruction import InstructionStyle, format_command, write_instruction

SOURCE = '''class Cart:
    def total(self, prices, *, tax=0.2) -> float:
        """The sum with tax.

        Empty for nothing.
        """
        return sum(prices) * (1 + tax)

    def count(self, prices):
        return len(prices)
'''
COMMAND = (*PYTEST, "--rootdir", ".", "-c", "/dev/null", "-o", "pythonpath=src")
FAILURES = {f"tests/test_cart.py::test_{name}": f"AssertionError: {name}" for name in "abcdefghij"}


def stubbed():
    text = SOURCE.replace("return sum(prices) * (1 + tax)", "raise NotImplementedError")
    return make_candidate("stub", {"cart.py": SOURCE}, {"cart.py": text}, ["cart.py::Cart.total"], "stubbed")


def mutated():
    text = SOURCE.replace("len(prices)", "len(prices) + 1")
    names = ["cart.py::Cart.count"]
    return make_candidate("mutate:off_by_one", {"cart.py": SOURCE}, {"cart.py": text}, names, "off by one")


def test_removed_definitions_show_signature_and_docstring_only():
    text = write_instruction(stubbed(), {"cart.py": SOURCE}, FAILURES, COMMAND)
    assert "`cart.py::Cart.total`" in text and "def total(self, prices, *, tax=0.2) -> float:" in text
    assert "The sum with tax." in text and "Empty for nothing." in text
    assert "sum(prices)" not in text
    bare = write_instruction(stubbed(), {"cart.py": SOURCE}, FAILURES, COMMAND, InstructionStyle(docstrings=False))
    assert "The sum with tax." not in bare and "def total" in bare


def test_a_mutation_shows_neither_place_nor_text():
    text = write_instruction(mutated(), {"cart.py": SOURCE}, FAILURES, COMMAND)
    assert "Cart" not in text and "cart.py::" not in text.replace("test_cart.py::", "")
    assert "len(prices)" not in text and "off by one" not in text


def test_tests_and_a_message_are_shown_and_can_be_left_out():
    text = write_instruction(mutated(), {"cart.py": SOURCE}, FAILURES, COMMAND)
    assert "- tests/test_cart.py::test_h\n- and 2 more\n" in text
    assert "    AssertionError: a\n" in text
    assert "`python -m pytest -o pythonpath=src TEST`" in text
    style = InstructionStyle(tests=False, message=False)
    quiet = write_instruction(mutated(), {"cart.py": SOURCE}, FAILURES, COMMAND, style)
    assert "test_cart" not in quiet and "AssertionError" not in quiet


def test_a_message_that_holds_a_removed_line_is_skipped():
    failures = {"t::a": "AssertionError: assert 3 == 2\n +  return len(prices)", "t::b": "TypeError: no"}
    text = write_instruction(mutated(), {"cart.py": SOURCE}, failures, COMMAND)
    assert "len(prices)" not in text and "    TypeError: no\n" in text


def test_the_command_is_shown_without_options_of_the_report():
    assert format_command(COMMAND) == "python -m pytest -o pythonpath=src"
    assert format_command((*PYTEST, "-c", "tox.ini")) == "python -m pytest -c tox.ini"
