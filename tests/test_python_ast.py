"""Syntax trees are made one thread at a time."""

import ast
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import composer_jax
from composer_jax.python_ast import parse_python


def test_threads_parse_while_the_garbage_collector_calls_back():
    """Without the lock, several of these 800 trees are a SystemError in Python 3.11."""
    files = sorted(Path(next(iter(composer_jax.__path__))).rglob("*.py"))[:100]
    sources = [path.read_bytes() for path in files]
    yield_to_others = lambda phase, info: time.sleep(1e-6)  # noqa: E731
    gc.callbacks.append(yield_to_others)
    try:
        with ThreadPoolExecutor(8) as threads:
            trees = list(threads.map(parse_python, sources * 8))
    finally:
        gc.callbacks.remove(yield_to_others)
    assert len(trees) == 800 and all(isinstance(tree, ast.Module) for tree in trees)


def test_an_error_names_the_file():
    with pytest.raises(SyntaxError) as error:
        parse_python("def", "a.py")
    assert error.value.filename == "a.py"
