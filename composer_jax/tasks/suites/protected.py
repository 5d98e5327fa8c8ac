"""Which paths of a workspace belong to its tests and to how they are run: what an agent did to them is not graded.

Standard library only: the same file also works in the container of an exported task.
"""

import os
import re

FOLDERS = ("test", "tests")
RUNS_BY_ITSELF = ("conftest.py", "sitecustomize.py", "usercustomize.py")
CONFIGURATION = (
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "pyproject.toml",
    "setup.cfg",
    "tox.ini",
    ".coveragerc",
)
# Beside a package: what lies in these folders can name plugins that pytest loads by itself.
METADATA = (".dist-info", ".egg-info", ".egg-link")
# Bytecode can say other than the source beside it.
COMPILED = (".pyc", ".pyo", ".pth", ".egg", ".so", ".pyd")
_TEST_FILE = re.compile(r"(test_.*|.*_test|tests?)\.py")


def is_protected(path):
    """Whether a relative posix path belongs to tests, test configuration, plugins or bytecode.

    A folder is protected as much as what is in it. Configuration files are protected as a whole: a suite is not run
    from an installation, so nothing else in them has an effect on it.
    """
    *folders, name = path.split("/")
    return (
        any(folder in FOLDERS or folder == "__pycache__" or folder.endswith(METADATA) for folder in (*folders, name))
        or name in RUNS_BY_ITSELF
        or name in CONFIGURATION
        or name.endswith(COMPILED)
        or _TEST_FILE.fullmatch(name) is not None
    )


def protected_files(folder):
    """Relative posix paths of all protected files and links below a folder, sorted."""
    found = []
    for where, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        for name in (*files, *links):
            path = os.path.relpath(os.path.join(where, name), folder).replace(os.sep, "/")
            if is_protected(path):
                found.append(path)
    return sorted(found)
