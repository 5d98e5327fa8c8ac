"""What a test compiled."""

import contextlib
from collections.abc import Iterator

from composer_jax.observe.compilations import compiled_since, count_compilations


@contextlib.contextmanager
def compiles_nothing() -> Iterator[None]:
    """Fails with the names of the programs that this process compiled in the block, in whatever thread."""
    before = count_compilations()
    yield
    programs = compiled_since(before)
    assert programs == [], f"compiled {programs}"
