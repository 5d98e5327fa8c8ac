"""The command line: overrides reach the config, and every user error is one sentence."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags as absl_flags

from composer_jax.errors import UserError
from composer_jax.schema.run_config import run_config
from composer_jax.stages.run import Run
from launch import flags
from launch.config_file import packaged_names
from tests.stages.base_model import write_base

ROOT = Path(__file__).parents[2]

CONFIG = """
from ml_collections import ConfigDict
from composer_jax.errors import UserError

def get_config(size="tiny"):
    if size not in ("tiny", "smoke"):
        raise UserError(f"no size {size!r}; sizes are tiny and smoke")
    return ConfigDict({
        "seed": 0, "size": size,
        "rl": {"steps": 60, "lr": 3e-4, "groups": 8, "overlap": True},
        "mesh": {"shape": (1, 1)}, "data": {"folder": "", "weights": {"code": 0.5}},
    })
"""


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    file = tmp_path / "tiny.py"
    file.write_text(CONFIG)
    return str(file)


def parse(config_file: str, *args: str):
    return flags.parse(["prog", f"--config={config_file}", "--workdir=runs/x", *args])


def exit_of(capsys, main, argv: list[str]) -> tuple[int, str, str]:
    """Returns (exit code, stdout, stderr) of an entry point."""
    with pytest.raises(SystemExit) as stop:
        flags.run(main, argv)
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_overrides_of_every_kind(config_file):
    config, workdir = parse(
        f"{config_file}:smoke",
        "--config.rl.steps=3",
        "--config.rl.lr",
        "1e-4",
        "--noconfig.rl.overlap",
        "--config.mesh.shape=(2, 4)",
        "--config.data.folder=/somewhere else",
        "--config.data.weights.code=0.25",
    )
    assert workdir == Path("runs/x") and config.size == "smoke"
    assert (config.rl.steps, config.rl.lr, config.rl.overlap) == (3, 1e-4, False)
    assert config.mesh.shape == (2, 4) and config.data.folder == "/somewhere else"
    assert config.data.weights.code == 0.25 and config.rl.groups == 8
    assert config.is_locked


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--config.rl.stepz=3"], "no field 'rl.stepz'; did you mean rl.steps"),
        (["--config.steps=3"], "no field 'steps'; did you mean rl.steps"),
        (["--noconfig.rl.overlapp"], "no field 'rl.overlapp'; did you mean rl.overlap"),
        (["--config.zzz=3"], "no field 'zzz'; it has data, mesh, rl"),
        (["--config.sampler.capacity=9"], "--config.sampler.capacity: sampler.capacity is now sampler.max_model_len"),
        (["--config.rl.steps.more=3"], "no field 'rl.steps.more'; did you mean rl.steps"),
        (["--config.rl=3"], "--config.rl is a group of fields; set one of rl.groups, rl.lr"),
        (["--config.rl.steps=abc"], "rl.steps is of type int, in the config 60"),
        (["--config.rl.steps=1.5"], "rl.steps is of type int, in the config 60"),
        (["--config.rl.overlap=maybe"], "rl.overlap is of type bool, in the config True"),
        (["--config.rl.steps"], "config.rl.steps"),
        (["--confg=3"], "confg"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_a_wrong_flag_is_one_sentence(config_file, args, expected):
    with pytest.raises(UserError) as error:
        parse(config_file, *args)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_missing_and_misplaced_files(config_file, tmp_path):
    def error_of(*args: str) -> str:
        with pytest.raises(UserError) as error:
            flags.parse(["prog", *args])
        return str(error.value)

    assert "--config is missing" in error_of("--workdir=x")
    assert "--workdir is missing" in error_of(f"--config={config_file}")
    assert f"there are {config_file}" in error_of(f"--config={tmp_path}/tine.py")
    assert "relative to the current folder" in error_of("--config=nowhere/tiny.py")
    assert error_of(f"--config={config_file}:huge") == "no size 'huge'; sizes are tiny and smoke"
    packaged = f"there is no packaged config 'nowhere'; packaged are {', '.join(packaged_names())}; a file of yours"
    assert packaged in error_of("--config=nowhere:smoke", "--workdir=w")
    (tmp_path / "none.py").write_text("def get_config(): return {}\n")
    assert "returns dict, not a ConfigDict" in error_of(f"--config={tmp_path}/none.py")


def test_a_packaged_config_is_found_by_its_name_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for config_flag in (["--config=tiny:smoke"], ["--config", "tiny:smoke"]):
        config, _ = flags.parse(["prog", *config_flag, "--workdir", "w", "--config.rl.steps=7"])
        assert config.rl.steps == 7 and config.pretrain.steps == 12 and config.is_locked
    with pytest.raises(UserError, match="did you mean rl.steps"):
        flags.parse(["prog", "--workdir", "w", "--config=tiny", "--config.rl.stepz=7"])


def test_run_calls_main_and_exits_with_zero(capsys, config_file):
    seen = []
    argv = ["prog", f"--config={config_file}", "--workdir=w", "--config.seed=7"]
    code, out, err = exit_of(capsys, lambda config, workdir: seen.append((config.seed, workdir)), argv)
    assert (code, out, err) == (0, "", "") and seen == [(7, Path("w"))]


def test_flags_beside_those_of_a_run(config_file):
    def define(values):
        absl_flags.DEFINE_string("extra", None, "One more.", flag_values=values)

    seen = []
    argv = ["prog", f"--config={config_file}", "--workdir=w", "--extra=e"]
    with pytest.raises(SystemExit):
        flags.run(lambda config, workdir, values: seen.append((workdir, values.extra)), argv, options=define)
    assert seen == [(Path("w"), "e")]


def raising(error: BaseException):
    def main(config, workdir):
        raise error

    return main


def test_user_errors_exit_with_a_sentence_and_a_code(capsys, config_file):
    argv = ["prog", f"--config={config_file}", "--workdir=w"]
    code, out, err = exit_of(capsys, raising(UserError("the folder\nis gone")), argv)
    assert code == 2 and out == "" and err.strip().endswith(": the folder is gone")
    # A task group wraps the errors of its tasks.
    code, _, err = exit_of(capsys, raising(ExceptionGroup("g", [UserError("a"), UserError("b")])), argv)
    assert code == 2 and err.strip().endswith(": a")
    full = OSError(errno.ENOSPC, "No space left on device", "w/x.bin")
    wrapped = RuntimeError("while saving")
    wrapped.__cause__ = full
    for error in (full, wrapped):
        code, _, err = exit_of(capsys, raising(error), argv)
        assert code == 3 and "No space left on device (w/x.bin); what was saved is kept" in err
        assert f"--config={config_file} --workdir=w" in err
    code, _, err = exit_of(capsys, raising(KeyboardInterrupt()), argv)
    assert code == 130 and "stopped." in err and "the same command continues" in err
    code, _, err = exit_of(capsys, lambda *_: None, argv + ["--config.sead=1"])
    assert code == 2 and err.count("\n") == 2 and "seed" in err


def test_unexpected_errors_keep_their_traceback(config_file):
    argv = ["prog", f"--config={config_file}", "--workdir=w"]
    with pytest.raises(ZeroDivisionError):
        flags.run(raising(ZeroDivisionError()), argv)
    with pytest.raises(ExceptionGroup):
        flags.run(raising(ExceptionGroup("g", [UserError("a"), ZeroDivisionError()])), argv)
    its_own_cause = ZeroDivisionError()
    its_own_cause.__cause__ = its_own_cause
    with pytest.raises(ZeroDivisionError):
        flags.run(raising(its_own_cause), argv)


def test_a_field_without_a_value_can_be_set():
    run = run_config(parse("tiny", "--config.rl.trigger=(60, 70)", "--config.model.q_lora_rank=12")[0])
    assert (run.rl.trigger, run.model.q_lora_rank) == ((60, 70), 12)


def test_help_lists_our_flags_and_the_fields(capsys, config_file):
    code, out, _ = exit_of(capsys, None, ["prog", "--help"])
    assert code == 0 and "--workdir" in out and "--config" in out and len(out.splitlines()) < 40
    code, out, _ = exit_of(capsys, None, ["prog", f"--config={config_file}", "--help"])
    assert code == 0 and "--config.rl.steps=60" in out and "--config.data.weights.code=0.5" in out


def test_help_gives_each_field_its_meaning_and_default(capsys):
    code, out, _ = exit_of(capsys, None, ["prog", "--config=tiny:smoke", "--help"])
    assert code == 0 and "--config.pretrain.steps=12 (default: 1000)\n      Optimizer steps.\n" in out
    assert "--config.evaluate.suites.bugfix.tasks=2 (default: 32)\n      Number of tasks.\n" in out
    assert "--config.seed=0\n      Seed of initialisation" in out


ENTRY = """
\"\"\"Waits.\"\"\"
import asyncio, sys, time
from launch import flags

def sleeping(config, workdir):
    print("ready", flush=True)
    time.sleep(60)

async def waiting():
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(60))
        print("ready", flush=True)

kind = sys.argv.pop(1)
flags.run(sleeping if kind == "sleep" else lambda config, workdir: asyncio.run(waiting()))
"""


@pytest.mark.parametrize(("kind", "sent"), [("sleep", signal.SIGTERM), ("asyncio", signal.SIGINT)])
def test_ctrl_c_and_sigterm_print_the_command_that_continues(config_file, tmp_path, kind, sent):
    script = tmp_path / "entry.py"
    script.write_text(ENTRY)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [
            sys.executable,
            str(script),
            kind,
            f"--config={config_file}",
            "--workdir=w",
            "--config.data.folder=a b",
        ],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(sent)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err and f"--config={config_file} --workdir=w '--config.data.folder=a b'" in err


@pytest.mark.skipif(sys.platform != "linux", reason="GLIBC_TUNABLES is Linux's")
@pytest.mark.parametrize(
    ("before", "after", "starts"),
    [
        ("", "glibc.malloc.hugetlb=1", 2),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1", 2),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0", 1),
    ],
)
def test_an_entry_point_restarts_itself_once_for_huge_pages(config_file, tmp_path, before, after, starts):
    code = """
import os, sys
from launch import flags
print("start", os.getpid())
if __name__ == "__main__":
    flags.run(lambda config, workdir: print("main", os.environ["GLIBC_TUNABLES"], sys.flags.no_site, *sys.argv[1:]))
"""
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | (
        {"GLIBC_TUNABLES": before} if before else {}
    )
    command = [sys.executable, "-u", "-c", code, f"--config={config_file}", "--workdir=a b"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    *started, main = done.stdout.splitlines()
    assert len(started) == starts and len(set(started)) == 1, "the process id stays"
    assert main == f"main {after} 0 --config={config_file} --workdir=a b"


def test_flags_of_its_own_beside_a_config(config_file):
    def define(values):
        absl_flags.DEFINE_string("stage", None, "Which part.", flag_values=values)
        return ("config", "stage")

    def parsed(*args: str):
        return flags.parse_flags(["prog", *args], define)[0]

    values = parsed(f"--config={config_file}", "--config.rl.steps=3", "--stage=rl")
    assert (values.stage, values.config.rl.steps, values.config.is_locked) == ("rl", 3, True)
    for args, sentence in [
        (["--stage=rl"], "--config is missing"),
        ([f"--config={config_file}"], "--stage is missing: Which part."),
        ([f"--config={config_file}", "--stage=rl", "--config.rl.stepz=3"], "did you mean rl.steps"),
        ([f"--config={config_file}", "--stage=rl", "--workdir=w"], "workdir"),
    ]:
        with pytest.raises(UserError, match=sentence):
            parsed(*args)


def test_a_begun_run_needs_no_config(tmp_path):
    """The config of the folder, which the command line may still compare with its own values."""
    config, _ = flags.parse(["prog", "--config=tiny:smoke", f"--workdir={tmp_path}"])
    with Run(config, tmp_path):
        stored = json.loads((tmp_path / "config.json").read_bytes())["config"]
    arguments = ["prog", f"--workdir={tmp_path}", "--config.rl.steps=7", "--config.profile.steps=2:3"]
    again, workdir = flags.parse(arguments)
    assert workdir == tmp_path and again.rl.steps == 7 and again.profile.steps == "2:3"
    again.rl.steps = config.rl.steps
    # The folder does not hold the profile, so that a run may go on with another one.
    assert json.loads(json.dumps(again.to_dict())) == stored | {"profile": {"steps": "2:3"}}
    again.profile.steps = ""
    with Run(again, tmp_path) as run:  # the folder takes both for the same config
        assert run.config == run_config(config)


def test_a_run_in_a_bucket_needs_no_config_either(bucket_url):
    config, workdir = flags.parse(["prog", "--config=tiny:smoke", f"--workdir={bucket_url}"])
    assert workdir == bucket_url
    with pytest.raises(UserError, match="--config is missing"):
        flags.parse(["prog", f"--workdir={bucket_url}"])
    with Run(config, bucket_url):
        again, _ = flags.parse(["prog", f"--workdir={bucket_url}"])
    with Run(again, workdir) as run:
        assert run.config == run_config(config) and run.workdir.url == bucket_url
    for url, sentence in (
        ("gs://no-such-bucket/run", "does not exist"),
        ("s3://bucket/run", "is not a place for a run"),
    ):
        with pytest.raises(UserError, match=sentence):
            flags.parse(["prog", f"--workdir={url}"])


def test_a_folder_without_a_run_needs_a_config(tmp_path):
    with pytest.raises(UserError, match="--config is missing.*a --workdir in which a run has begun"):
        flags.parse(["prog", f"--workdir={tmp_path}"])


@pytest.mark.parametrize(("context", "length"), [(4096, 4096), (131_072, 32_768)])
def test_a_base_needs_no_config(tmp_path, context, length):
    folder = write_base(tmp_path / "base")
    network = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(network | {"max_position_embeddings": context}))
    base = f"hf:{folder}"
    config, _ = flags.parse(["prog", f"--config.base={base}", "--workdir=w", "--config.seed=4"])
    assert (config.base, config.seed, config.stages) == (base, 4, ("sft", "rl"))
    assert (config.sft.seq_len, config.sampler.max_model_len, config.rl.batches[0][0]) == (length, length, length)


def test_a_base_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path / "none")):
        flags.parse(["prog", f"--config.base=hf:{tmp_path / 'none'}", "--workdir=w"])
