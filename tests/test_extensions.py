"""Names of a table, import paths, and the sentences for what is neither."""

import pytest

from composer_jax.errors import UserError
from composer_jax.extensions import resolve

TABLE = {"sum": sum}


def test_resolve_prefers_the_table_and_falls_back_to_an_import_path():
    assert resolve("sum", TABLE, "x.name") is sum
    assert resolve("math:floor", TABLE, "x.name")(2.5) == 2
    assert resolve("collections:Counter.update", TABLE, "x.name").__name__ == "update"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", "x.name='mean' is unknown; use one of sum, or an import path like"),
        ("no_such_module:f", "x.name='no_such_module:f' cannot be imported: No module named 'no_such_module'"),
        ("math:no_such_function", "cannot be imported: module 'math' has no attribute 'no_such_function'"),
        (":f", "cannot be imported: Empty module name"),
    ],
)
def test_resolve_names_the_field_and_the_way_out(name, message):
    with pytest.raises(UserError, match=message):
        resolve(name, TABLE, "x.name")
