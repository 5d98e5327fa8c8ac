"""launch.compile as a user runs it, for a small network, without TPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from launch import compile as compile_entry
from launch import hosts
from launch.compile import parse_options
from tests.launch.in_process import run_here
from tests.scale.configuration import FIELDS

ROOT = Path(__file__).parents[2]
NEEDS_LIBTPU = pytest.mark.usefixtures("libtpu")
KEYS = {
    "fits",
    "params_total",
    "params_active",
    "bytes_per_chip",
    "flops_per_step",
    "predicted_step_seconds",
    "predicted_mfu",
    "collective_bytes",
    "compile_seconds",
}


def compiled(*arguments: str) -> subprocess.CompletedProcess:
    """launch.compile in a process of its own, as a user runs it."""
    command = [sys.executable, "-m", "launch.compile", "--config=configs/moonlight.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)


def small(*arguments: str) -> subprocess.CompletedProcess:
    fields = [f"--config.{path}={value}" for path, value in FIELDS.items()]
    return compiled(*fields, *arguments)


TRAINING = {"params", "optimizer", "router_bias", "batch", "gradient"}
SAMPLING = {"params", "router_bias", "batch", "cache"}


@pytest.mark.slow
@NEEDS_LIBTPU
@pytest.mark.parametrize(
    ("stage", "topology", "expected"),
    [
        ("sft", "v5e:2x2", TRAINING),
        ("rl", "v5e:2x2", TRAINING),
        ("evaluate", "v5p:2x2x1", SAMPLING),
    ],
)
def test_a_stage_compiles_and_the_last_line_is_the_result(stage, topology, expected, tmp_path):
    run = small(f"--topology={topology}", f"--stage={stage}", f"--out={tmp_path}/plan.json")
    assert run.returncode == 0, run.stderr
    line = run.stdout.splitlines()[-1]
    assert line + "\n" == (tmp_path / "plan.json").read_text()
    result = json.loads(line)
    assert KEYS <= result.keys() and result["fits"] is True
    assert_consistent(result, expected)
    if stage != "evaluate":
        # Recomputation and the masked half of attention add to the model's own FLOPs.
        assert 1 < result["executed_flops_per_step"] / result["flops_per_step"] < 2
    assert ("decode" in result) is (stage != "sft")
    if stage != "sft":
        assert len(result["prefill"]) == 1
        for step in (result["decode"], *result["prefill"].values()):
            assert_consistent(step, SAMPLING)
        assert "\ndecode: " in run.stderr and "\nprefill " in run.stderr
    assert "fits" in run.stderr and "memory of one device" in run.stderr


def assert_consistent(step, memory_keys):
    memory, times = step["bytes_per_chip"], step["step_seconds"]
    assert memory.keys() == memory_keys | {"temporary", "other", "total", "limit"}
    assert sum(memory.values()) == pytest.approx(2 * memory["total"] + memory["limit"])
    assert 0 < step["predicted_mfu"] < 1 and step["params_active"] < step["params_total"]
    assert step["compile_seconds"] > 0 and step["collective_bytes"].keys() <= {"data", "expert", "data+expert"}
    assert times["full_overlap"] <= times["weight_gathers_overlap"] <= times["no_overlap"]
    assert step["predicted_step_seconds"] == times["weight_gathers_overlap"]
    exposed = sum(step["compiled_communication"]["exposed"].values())
    computing = times["no_overlap"] - step["communication_seconds"]
    assert times["as_compiled"] == pytest.approx(computing + exposed)
    assert sum(step["profile_seconds"].values()) == pytest.approx(times["no_overlap"])


def test_compiler_options_have_a_name_and_a_value():
    assert parse_options(["xla_a=true", "xla_b=x=1"]) == {"xla_a": "true", "xla_b": "x=1"}
    for word in ("xla_a", "=1", "xla_a="):
        with pytest.raises(UserError, match=f"--compiler_options: '{word}' is not an option; write NAME=VALUE"):
            parse_options([word])


@NEEDS_LIBTPU
def test_an_option_that_the_compiler_does_not_know_is_one_sentence():
    run = small("--topology=v5e:2x2", "--stage=sft", "--compiler_options=xla_unknown=1")
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert "the compiler refuses an option of {'xla_unknown': '1'}: " in run.stderr


@pytest.mark.slow
@NEEDS_LIBTPU
def test_what_does_not_fit_is_reported_with_the_compilers_numbers():
    run = small(
        "--topology=v5e:2x2", "--stage=pretrain", "--config.model.vocab_size=8000000", "--config.pretrain.seq_len=1024"
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    memory = result["bytes_per_chip"]
    assert result["fits"] is False and "RESOURCE_EXHAUSTED" in memory["refused"]
    assert memory["total"] > memory["limit"] and "does not fit" in run.stderr
    assert result["predicted_step_seconds"] > 0


def ended(capsys, *arguments: str) -> tuple[int, str, str]:
    return run_here(capsys, compile_entry, "--config=moonlight", *arguments, processes=hosts.NO_DEVICES)


REFUSED = {
    "--stage=pretrain": "--topology is missing",
    "--topology=v5e:2x2 --stage=serve": "--stage=serve is unknown; the stages are pretrain, sft, rl, evaluate.",
    "--topology=v5e:2x2 --stage=rl --config.mesh.exprt=2": "did you mean mesh.expert",
    "--topology=v5e --stage=rl": "--topology=v5e is unknown",
    "--topology=v5e:2x2 --stage=rl --config.model.heads_at_once=0": "heads_at_once=0 must be a whole number",
}
REFUSED_WITH_A_COMPILER = {
    "--topology=v5e:3x7": "--topology=v5e:3x7 does not exist",
    "--topology=v5e:2x2 --config.mesh.expert=3": "4 devices do not divide over expert=3, which leaves none for data=-1",
    "--topology=v5e:2x2 --config.pretrain.seq_len=9000": "pretrain.seq_len=9000 is longer than the context",
    "--topology=v5e:2x2 --config.pretrain.batch_size=5": "pretrain.batch_size=5 does not divide over 4 devices",
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.items())
def test_bad_input_is_one_sentence(capsys, arguments, sentence):
    code, _, err = ended(capsys, *arguments.split())
    assert code == 2 and sentence in err


@NEEDS_LIBTPU
@pytest.mark.parametrize(("arguments", "sentence"), REFUSED_WITH_A_COMPILER.items())
def test_sizes_that_do_not_fit_are_one_sentence(capsys, arguments, sentence):
    code, _, err = ended(capsys, "--stage=pretrain", *arguments.split())
    assert code == 2 and sentence in err


def test_help_lists_the_flags(capsys):
    code, out, _ = ended(capsys, "--help")
    assert code == 0 and "--topology:" in out and "--config:" in out
