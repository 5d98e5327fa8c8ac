"""Tasks from a published package, a few of them; `python -m benchmarks.tasks` makes many."""

import asyncio
import shutil

import pytest

from benchmarks.tasks import REQUIREMENTS, fetch, measure
from composer_jax.tasks.repository.build import install


@pytest.mark.slow
def test_a_published_package_gives_valid_tasks_of_many_kinds(tmp_path):
    packages = install(REQUIREMENTS, tmp_path / "packages")
    repository = fetch("cachetools==5.5.2", tmp_path)
    result = asyncio.run(measure(repository, packages, tmp_path / "out", count=6, runs=2))
    assert result["tests"] == 216 and result["unreliable"] == 0
    assert result["tasks"] == 6 and result["kinds"] >= 4 and result["families"] >= 3
    assert (result["gold"], result["nothing"]) == ("12 of 12", "12 of 12")
    shutil.rmtree(tmp_path / "out")
