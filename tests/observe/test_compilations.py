"""Compilations are counted, named and told apart by thread."""

import threading

import jax
import numpy as np
import pytest

from composer_jax.observe.compilations import compilations_since, count_compilations
from tests.compilations import compiles_nothing


def compile_one() -> None:
    """Compiles, or loads, a program called `negate`."""

    def negate(x):
        return -x

    jax.jit(negate)(np.zeros(3))


def test_what_was_compiled_has_its_name_and_thread():
    before = count_compilations()
    compile_one()
    assert count_compilations() == before + 1
    [compiled] = compilations_since(before)
    assert "negate" in compiled.program and compiled.thread is threading.current_thread()


def test_a_block_that_compiles_is_told_what():
    with pytest.raises(AssertionError, match="negate"), compiles_nothing():
        compile_one()


def test_a_block_is_told_what_its_threads_compile():
    with pytest.raises(AssertionError, match="negate"), compiles_nothing():
        thread = threading.Thread(target=compile_one)
        thread.start()
        thread.join()


def test_an_older_thread_may_compile():
    start = threading.Event()
    older = threading.Thread(target=lambda: start.wait() and compile_one())
    older.start()
    before = count_compilations()
    with compiles_nothing():
        start.set()
        older.join()
    assert count_compilations() == before + 1
