"""The leak gate finds the files in which removed code can still be read."""

import py_compile

from composer_jax.tasks.repository.leaks import LINES_IN_A_ROW, ReadableFiles, find_installed_copies
from tests.tasks.conftest import lay

REMOVED = """    def total(self, prices):
        subtotal = sum(price for price in prices)
        discount = self.discount(subtotal)

        if discount > subtotal:
            raise ValueError(discount)
        return subtotal - discount
"""


def leaking_files(tmp_path, files, removed=REMOVED, **more):
    folder = lay(tmp_path / "folder", files)
    return [leak.path.removeprefix(f"{folder}/") for leak in ReadableFiles([folder]).find_leaks([removed], **more)]


def test_lines_in_a_row_are_found_whatever_their_indentation(tmp_path):
    copied = "\n".join(line.strip() for line in REMOVED.splitlines())
    files = {
        "docs/usage.md": f"Like so:\n\n{copied}\n",
        "a.py": "def total():\n    return 0\n",
        "data.bin": b"\0" + REMOVED.encode(),
    }
    assert leaking_files(tmp_path, files) == ["docs/usage.md"]


def test_fewer_lines_are_not_a_leak(tmp_path):
    some = "\n".join([line for line in REMOVED.splitlines() if line.strip()][: LINES_IN_A_ROW - 1])
    files = {"a.txt": some}
    assert leaking_files(tmp_path, files) == []
    assert leaking_files(tmp_path, files, lines=LINES_IN_A_ROW - 1) == ["a.txt"]
    assert leaking_files(tmp_path, {"b.txt": REMOVED}, removed="    return 1\n") == []


def test_compiled_functions_are_found(tmp_path):
    source = lay(tmp_path, {"cart.py": "class Cart:\n" + REMOVED, "other.py": "def total(x):\n    return x\n"})
    for name in ("cart", "other"):
        py_compile.compile(str(source / f"{name}.py"), cfile=str(source / "folder" / "cache" / f"{name}.pyc"))
    assert leaking_files(tmp_path, {"broken.pyc": b"no code"}) == ["cache/cart.pyc"]


def test_replacements_are_searched_in_place_of_the_files(tmp_path):
    path = tmp_path / "folder" / "cart.py"
    assert leaking_files(tmp_path, {"cart.py": REMOVED}) == ["cart.py"]
    assert leaking_files(tmp_path, {"cart.py": REMOVED}, replacements={path: "x = 1\n"}) == []
    assert leaking_files(tmp_path, {"cart.py": REMOVED}, replacements={path: None}) == []
    assert leaking_files(tmp_path, {"cart.py": "x = 1\n"}, replacements={path: f"# kept\n{REMOVED}"}) == ["cart.py"]


def test_installed_copies_of_the_repository_are_found(tmp_path):
    lay(tmp_path, {"cart/__init__.py": "", "shop.py": "", "fast.cpython-311.so": b"", "pytest/__init__.py": ""})
    names = [leak.path.rpartition("/")[2] for leak in find_installed_copies(tmp_path, ("cart", "fast", "shop", "till"))]
    assert names == ["cart", "fast.cpython-311.so", "shop.py"]
    assert find_installed_copies(None, ("cart",)) == []
