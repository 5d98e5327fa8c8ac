"""Protected paths: tests, test configuration, plugins and bytecode. Changes that an agent makes to them are not graded.

Standard library only: this file also runs in the container of an exported task.
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
# Metadata folders beside a package can name plugins that pytest loads by itself.
METADATA = (".dist-info", ".egg-info", ".egg-link")
# Bytecode can differ from the source beside it.
COMPILED = (".pyc", ".pyo", ".pth", ".egg", ".so", ".pyd")
_TEST_FILE = re.compile(r"(test_.*|.*_test|tests?)\.py")


def is_protected(path):
    """Whether a relative posix path belongs to tests, test configuration, plugins or bytecode.

    A protected folder protects everything in it. A configuration file is protected as a whole: a suite does not run
    from an installation, so the file has no other effect on it.
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
    """Returns the sorted relative posix paths of all protected files and links below a folder."""
    protected = []
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in (*files, *links):
            path = os.path.relpath(os.path.join(parent, name), folder).replace(os.sep, "/")
            if is_protected(path):
                protected.append(path)
    return sorted(protected)
