"""The repository and the server of the tests."""

import shutil

import pytest

from tests.realtime.track.recording_server import recording_server
from tests.realtime.track.tracked_repository import TrackedRepository


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    return TrackedRepository(tmp_path_factory.mktemp("template") / "repository")


@pytest.fixture
def repository(template, tmp_path, monkeypatch):
    """A TrackedRepository without sessions."""
    monkeypatch.setenv("HOME", str(tmp_path))
    copy = object.__new__(TrackedRepository)
    copy.root, copy.now, copy.reports = tmp_path / "repository", 1000.0, []
    shutil.copytree(template.root, copy.root)
    copy.tracker = copy.new_tracker()
    return copy


@pytest.fixture
def server():
    with recording_server() as recorder:
        yield recorder
