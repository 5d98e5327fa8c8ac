"""What the tests of tasks share: real sandboxes, ones that die, and packages that suites in sandboxes import."""

import importlib.metadata
import shutil
from pathlib import Path

import pytest

from composer_jax.sandbox import Change, LocalSandboxPool, SandboxLimits
from tests.agent.conftest import DyingPool

NEEDED = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


@pytest.fixture(scope="session")
def pool():
    pool = LocalSandboxPool(SandboxLimits(timeout_s=10), size=4)
    yield pool
    pool.kill()


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """A folder as `pip install --target` makes it, with pytest as it is installed here."""
    return copy_installed(NEEDED, tmp_path_factory.mktemp("packages"))


def copy_installed(names, folder):
    """Copies the files of installed distributions to a folder, and returns it."""
    for name in names:
        for file in importlib.metadata.files(name):
            source = Path(file.locate())
            if ".." not in file.parts and source.is_file():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, folder / file)
    return folder


@pytest.fixture
def dying_pool(pool):
    return lambda deaths: DyingPool(pool, deaths)


def as_changes(files):
    """Changes of a workspace that stands on nothing and holds these files."""
    return {path: Change("file", data if isinstance(data, bytes) else data.encode()) for path, data in files.items()}


def lay(folder, files):
    """Writes files below a folder, and returns it."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder
