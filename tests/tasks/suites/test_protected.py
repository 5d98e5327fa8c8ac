"""Protected paths of a workspace."""

from composer_jax.tasks.suites.protected import is_protected, protected_files
from tests.tasks.conftest import lay


def test_protected_paths(tmp_path):
    paths = ["test_a.py", "a_test.py", "pkg/tests/x.txt", "tests", "conftest.py", "a/pytest.ini", "pyproject.toml"]
    paths += ["setup.cfg", "tox.ini", "a.pth", "x.egg-info/PKG-INFO", "a/__pycache__/b.pyc", "usercustomize.py", "a.so"]
    free = ["a.py", "attest.py", "latest.py", "contests/a.py", "setup.py", "README.md", "pkg/testing.py", "data.json"]
    assert all(map(is_protected, paths)) and not any(map(is_protected, free))
    lay(tmp_path, {"a.py": "", "tests/data.txt": "", "b/conftest.py": ""})
    assert protected_files(tmp_path) == ["b/conftest.py", "tests/data.txt"]
