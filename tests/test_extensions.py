"""Names of a table, import paths, and the sentences for what is neither."""

import pytest

from composer_jax.errors import UserError
from composer_jax.extensions import resolve

TABLE = {"sum": sum}


def test_resolve_prefers_the_table_and_falls_back_to_an_import_path():
    assert resolve("sum", TABLE, "x.name") is sum
    assert resolve("math:floor", TABLE, "x.name")(2.5) == 2
    assert resolve("collections:Counter.update", TABLE, "x.name").__name__ == "update"


def test_a_file_is_imported_once(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("from dataclasses import dataclass\n@dataclass\nclass Own:\n    number: int = 3\n")
    own = resolve(f"{file}:Own", TABLE, "x.name")
    assert own().number == 3 and resolve(f"{file}:Own", TABLE, "x.name") is own
    file.with_name("broken.py").write_text("import no_such_module")
    for _ in range(2):  # a failed import leaves no empty module behind
        with pytest.raises(UserError, match=r"broken.py:Own' cannot be imported: No module named 'no_such_module'"):
            resolve(f"{tmp_path}/broken.py:Own", TABLE, "x.name")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", "x.name='mean' is unknown; use one of sum, or an import path like"),
        ("no_such_module:f", "x.name='no_such_module:f' cannot be imported: No module named 'no_such_module'"),
        ("math:no_such_function", "cannot be imported: module 'math' has no attribute 'no_such_function'"),
        ("no_such.py:f", "x.name='no_such.py:f' cannot be imported: .*No such file"),
        (":f", "cannot be imported: Empty module name"),
    ],
)
def test_resolve_names_the_field_and_the_way_out(name, message):
    with pytest.raises(UserError, match=message):
        resolve(name, TABLE, "x.name")
