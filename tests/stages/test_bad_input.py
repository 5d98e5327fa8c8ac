"""Bad input ends in one sentence and exit code 2, before anything is computed."""

import pytest

from tests.stages.command_line import finish, start

SMOKE = "--config=configs/tiny.py:smoke"


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """(workdir, arguments) -> the sentence with which the pipeline ends."""
    cache = tmp_path_factory.mktemp("xla")

    def run(workdir, *arguments):
        result = finish(start(workdir, *arguments, cache=cache), timeout=300)
        assert result.returncode == 2, result.stderr
        assert "Traceback" not in result.stderr
        last = [line for line in result.stderr.splitlines() if line.startswith("launch.pipeline: ")]
        assert len(last) == 1 and result.stderr.strip().endswith(last[0])
        return last[0]

    return run


def test_a_field_that_does_not_exist(refused, tmp_path):
    assert "'nonsense'" in refused(tmp_path / "run", SMOKE, "--config.nonsense=1")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_source_that_cannot_be_read_and_then_another_config(refused, tmp_path):
    """The folder is claimed by the first config, whatever became of it."""
    workdir, missing = tmp_path / "run", tmp_path / "missing"
    assert str(missing) in refused(workdir, SMOKE, f"--config.data.source={missing}")
    sentence = refused(workdir, SMOKE, f"--config.data.source={missing}", "--config.seed=5")
    assert "another config" in sentence and "seed: 0 -> 5" in sentence
    assert not list(workdir.glob("stages/*.json")) and not list(workdir.glob("checkpoints/*"))
