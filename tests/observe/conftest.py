from pathlib import Path

import pytest

from tests.observe.example_run import make_workdir


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests read it and do not change it."""
    return make_workdir(tmp_path_factory.mktemp("runs") / "tiny")
