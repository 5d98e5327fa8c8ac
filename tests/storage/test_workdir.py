"""Run folders: one config, one process, stages that are done or not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from composer_jax.storage.workdir import Workdir

ROOT = Path(__file__).parents[2]
CONFIG = {"seed": 0, "rl": {"steps": 60, "lr": 3e-4}, "mesh": {"shape": (2, 4)}}


def complaint(path: Path, config: dict = CONFIG) -> str:
    with pytest.raises(UserError) as error:
        Workdir(path, config)
    return str(error.value)


def test_a_new_folder_records_its_config(tmp_path):
    with Workdir(tmp_path / "a" / "b", CONFIG) as workdir:
        record = json.loads((workdir.path / "config.json").read_text())
    assert record["config"] == {"seed": 0, "rl": {"steps": 60, "lr": 3e-4}, "mesh": {"shape": [2, 4]}}
    assert record["config_hash"] == workdir.config_hash and len(workdir.config_hash) == 12


def test_the_hash_is_of_the_values_not_of_their_order(tmp_path):
    reordered = {"mesh": {"shape": [2, 4]}, "rl": {"lr": 0.0003, "steps": 60}, "seed": 0}
    with Workdir(tmp_path, CONFIG) as first:
        pass
    with Workdir(tmp_path, reordered) as second:
        assert first.config_hash == second.config_hash
    with Workdir(tmp_path / "other", {**CONFIG, "seed": 1}) as third:
        assert third.config_hash != first.config_hash


def test_another_config_is_refused_field_by_field(tmp_path):
    Workdir(tmp_path, CONFIG).close()
    other = {"seed": 0, "rl": {"steps": 100, "lr": 3e-4, "kl": None}, "mesh": {"shape": (8, 1)}}
    message = complaint(tmp_path, other)
    assert "mesh.shape: [2, 4] -> [8, 1], rl.kl: absent -> null, rl.steps: 60 -> 100 (there -> here)" in message
    assert str(tmp_path) in message and "choose another --workdir" in message
    # An integer and a float, or a flag and a number, are different values even where Python calls them equal.
    assert "seed: 0 -> false" in complaint(tmp_path, {**CONFIG, "seed": False})
    Workdir(tmp_path, CONFIG).close()  # the refusals changed nothing and hold no lock


def test_many_differences_end_in_a_count(tmp_path):
    Workdir(tmp_path, {f"f{i:02}": 0 for i in range(20)}).close()
    message = complaint(tmp_path, {f"f{i:02}": "x" * 100 for i in range(20)})
    assert "f07: 0" in message and "f08" not in message and "and 12 more" in message
    assert len(message) < 1000


def test_stages_are_done_or_not(tmp_path):
    with Workdir(tmp_path, CONFIG) as workdir:
        assert not workdir.stage_done("sft")
        with pytest.raises(UserError, match="stage 'sft' is not done"):
            workdir.stage_result("sft")
        workdir.mark_done("sft", {})
        workdir.mark_done("rl", {"steps": 3})
        workdir.mark_done("rl", {"steps": 4})
        with pytest.raises(ValueError, match="file name"):
            workdir.mark_done("../escape", {})
    with Workdir(tmp_path, CONFIG) as again:
        assert again.stage_done("sft") and again.stage_result("sft") == {}
        assert again.stage_result("rl") == {"steps": 4}
        assert not again.stage_done("evaluate")


def test_two_runs_never_share_a_folder(tmp_path):
    code = (
        "import sys; from composer_jax.storage.workdir import Workdir\n"
        f"workdir = Workdir(sys.argv[1], {CONFIG!r}); print('open', flush=True); sys.stdin.read()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    assert f"{tmp_path} is in use by process {process.pid}" in complaint(tmp_path)
    process.kill()  # however a process ends, its lock ends with it
    process.wait()
    with Workdir(tmp_path, CONFIG):
        assert f"in use by process {os.getpid()}" in complaint(tmp_path)
    Workdir(tmp_path, CONFIG).close()


def test_other_processes_share_the_folder_that_the_first_one_holds(tmp_path):
    with Workdir(tmp_path, CONFIG) as first:
        with Workdir(tmp_path, CONFIG, holder=first.holder) as second:
            first.mark_done("sft", {})
            assert second.stage_done("sft") and second.config_hash == first.config_hash
        assert "in use by process" in complaint(tmp_path), "the second gave back what it never had"
        with pytest.raises(UserError, match="seed: 0 -> 1"):
            Workdir(tmp_path, {**CONFIG, "seed": 1}, holder=first.holder)
    with Workdir(tmp_path, CONFIG) as later:
        assert later.holder != first.holder
        for folder, holder in ((tmp_path, first.holder), (tmp_path / "elsewhere", later.holder)):
            with pytest.raises(UserError, match="is not the folder that process 0 works in.*hosts share"):
                Workdir(folder, CONFIG, holder=holder)
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_of_someone_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    assert "is not empty (thesis.tex) and not the folder of a run" in complaint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_cannot_be_a_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    assert f"cannot use {file} as a run folder" in complaint(file)
    assert "cannot use" in complaint(file / "below")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    assert "config.json cannot be read" in complaint(broken)
    (broken / "config.json").write_text("[]")
    assert "is not the config of a run" in complaint(broken)


def test_a_run_killed_in_its_first_moments_can_start_again(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.json.1234abcd").write_text("{")
    Workdir(tmp_path, CONFIG).close()


def test_a_config_that_is_not_plain_data(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        Workdir(tmp_path / "new", {"path": Path("x")})
    assert not (tmp_path / "new").exists()


def test_disk_space_in_numbers(tmp_path):
    with Workdir(tmp_path, CONFIG) as workdir:
        workdir.require_free(1)
        with pytest.raises(UserError, match=r"GB free and this run needs 1000000\.0 GB"):
            workdir.require_free(10**15)


def test_the_rules_of_traffic_may_change_and_its_simulated_users_may_not(tmp_path):
    config = {"seed": 0, "traffic": {"kl_limit": 0.02, "users": "", "users_options": {}}}
    with Workdir(tmp_path / "run", config):
        pass
    with Workdir(tmp_path / "run", {**config, "traffic": config["traffic"] | {"kl_limit": 0.1}}):
        pass
    with pytest.raises(UserError, match=r"another config: traffic.users:"):
        Workdir(tmp_path / "run", {**config, "traffic": config["traffic"] | {"users": "mine:Users"}})
