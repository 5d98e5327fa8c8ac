"""Entry points with two processes of four devices compute what one of eight computes, and end together."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import flags as absl_flags

from composer_jax.checkpoint.native import read_model_config, restore_weights
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.data.prepare.config import PrepareConfig
from composer_jax.data.prepare.prepare import prepare
from composer_jax.errors import UserError
from composer_jax.evals.score_files import score_files
from composer_jax.models.model_def import ModelDef
from composer_jax.observe.metrics import read_metrics
from composer_jax.parallel import processes
from composer_jax.schema.run_config import run_config
from composer_jax.stages.pretrain import pretrain
from composer_jax.stages.run import Run
from composer_jax.stages.run_data import RunData
from composer_jax.storage.bucket import BucketFolder
from configs import tiny
from launch import flags, hosts
from tests.models.small import relative_error

ROOT = Path(__file__).parents[2]
STEPS = 12
# The smallest of everything that configs/tiny.py:sharded can be trained with, on data=2 x expert=4.
FIELDS = {
    "mesh.data": 2,
    "mesh.expert": 4,
    "mesh.context": 1,
    "mesh.tensor": 1,
    "rl.batches": ((256, 16),),
    "sampler.max_model_len": 256,
    "model.vocab_size": 512,
    "model.d_model": 32,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.kv_lora_rank": 16,
    "model.qk_nope_dim": 8,
    "model.qk_rope_dim": 8,
    "model.v_head_dim": 8,
    "model.dense_ff_dim": 32,
    "model.expert_ff_dim": 16,
    "model.n_shared_experts": 1,
    "model.n_mtp_modules": 0,
    "model.embedding_taps": 0,
    "model.init": "normal",
    "data.max_bytes": 60000,
    "data.max_heldout_bytes": 4000,
    "data.tokenizer_bytes": 60000,
    "data.tokenizer_texts.tasks.count": 10,
    "pretrain.steps": STEPS,
    "pretrain.seq_len": 64,
    "pretrain.sources.exercises.weight": 0.0,
    "pretrain.sources.exercises.options.count": 1,
    "pretrain.loss.mtp_weight": 0.0,
    "pretrain.evaluate_every": 4,
    "pretrain.save_every": 4,
}
CONFIG = ("--config=configs/tiny.py:sharded", *(f"--config.{field}={value}" for field, value in FIELDS.items()))


# ------------------------------------------------------------------------------ flags


def parse_flags(*arguments: str) -> absl_flags.FlagValues:
    values = absl_flags.FlagValues()
    hosts.define_flags(values)
    values(["prog", *arguments])
    return values


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--processes=2"], "--processes=2 without --coordinator=HOST:PORT"),
        (["--process=1"], "--process=1 without --coordinator"),
        (["--processes=2", "--process=1"], "--processes=2 and --process=1 without --coordinator"),
        (["--coordinator=a:1", "--process=1"], "--coordinator needs --processes"),
        (["--coordinator=a:1", "--processes=2"], "--coordinator needs --processes"),
        (["--coordinator=a", "--processes=2", "--process=1"], "'a' is not HOST:PORT"),
        (["--coordinator=a:1", "--processes=2", "--process=2"], "process=2 is not one of 0 .. 1"),
    ],
    ids=str,
)
def test_flags_that_do_not_fit_are_one_sentence(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        hosts.join(parse_flags(*arguments), "prog", hosts.MULTI_PROCESS)


@pytest.fixture
def pod_of_four(monkeypatch):
    monkeypatch.setattr("composer_jax.parallel.cluster_env.detect_process_count", lambda: 4)
    joined = []
    monkeypatch.setattr(processes, "join_processes", lambda *arguments: joined.append(arguments))
    return joined


def test_on_a_pod_no_flag_is_needed(pod_of_four, monkeypatch):
    monkeypatch.setattr("composer_jax.parallel.failure.watch_for_failures", lambda program: f"end of {program}")
    assert hosts.join(parse_flags(), "prog", hosts.MULTI_PROCESS) == "end of prog"
    assert pod_of_four == [(None,)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("kind", "arguments"), [(hosts.MULTI_PROCESS, ["--processes=1"]), (hosts.NO_DEVICES, [])], ids=str
)
def test_a_pod_is_ignored_with_one_process_or_without_devices(pod_of_four, kind, arguments):
    assert hosts.join(parse_flags(*arguments), "prog", kind) is None and not pod_of_four


def test_without_a_cluster_environment_there_is_one_process():
    assert hosts.join(parse_flags(), "prog", hosts.SINGLE_PROCESS) is None


@pytest.mark.parametrize("arguments", [[], ["--coordinator=a:1", "--processes=4", "--process=0"]], ids=str)
def test_a_single_process_entry_point_refuses_before_it_waits(pod_of_four, arguments):
    with pytest.raises(UserError, match="launch.rl supports one process only for now, and there are 4"):
        hosts.join(parse_flags(*arguments), "launch.rl", hosts.SINGLE_PROCESS)
    assert not pod_of_four


# ------------------------------------------------------------------------------ processes


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def start(cache):
    """(entry point, arguments) -> the process, which is killed at the end if it still runs."""
    with contextlib.ExitStack() as at_end:

        def one(entry: str, *arguments: str) -> subprocess.Popen:
            env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
            process = subprocess.Popen(
                [sys.executable, "-m", f"launch.{entry}", *arguments],
                cwd=ROOT,
                env={"JAX_COMPILATION_CACHE_DIR": str(cache)} | env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            at_end.callback(process.communicate)
            at_end.callback(process.kill)
            return process

        yield one


def of_two(index: int, port: int) -> tuple[str, ...]:
    return f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={index}"


@pytest.fixture(scope="module")
def start_two(start):
    """(entry point, arguments of both, own arguments of each) -> the two processes."""

    def two(entry: str, *arguments: str, own=((), ())) -> list[subprocess.Popen]:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        return [start(entry, *arguments, *own[i], *of_two(i, port)) for i in range(2)]

    return two


def ends(started: list[subprocess.Popen], code: int = 0) -> list[tuple[str, str]]:
    """(stdout, stderr) of processes that end with an exit code."""
    outputs = [process.communicate(timeout=900) for process in started]
    assert [process.returncode for process in started] == [code] * len(started), outputs
    return outputs


def measured(workdir: Path) -> np.ndarray:
    """[steps, 3]: step, loss and norm of the gradient."""
    rows = [row for row in read_metrics(workdir / "metrics" / "pretrain.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return np.array([[row["step"], row["loss"], row["grad_norm"]] for row in rows])


def weights(workdir: Path | str):
    with CheckpointStore(f"{workdir}/checkpoints/pretrain") as store:
        assert store.latest_step() == STEPS
        return restore_weights(store, ModelDef(read_model_config(store)), None)


def assert_same(workdir: Path, other: Path) -> None:
    np.testing.assert_allclose(measured(workdir), measured(other), rtol=1e-6)
    # Adam divides by small numbers: a rounding of a gradient is a larger part of a step.
    assert max(jax.tree.leaves(jax.tree.map(relative_error, weights(workdir), weights(other)))) < 1e-5


PREPARED_CONFIG = """
from configs import tiny


def get_config():
    config = tiny.get_config("sharded")
    config.pretrain.sources.prepared = {{"kind": "prepared", "options": {{"path": {path!r}}}}}
    return config
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Flags of a run that reads prepared shards beside documents in memory."""
    folder = tmp_path_factory.mktemp("prepared")
    plain = tiny.get_config("sharded")
    plain.update_from_flattened_dict(FIELDS)
    assert RunData(run_config(plain.to_dict()), folder).tokenizer.vocab_size == FIELDS["model.vocab_size"]
    sources = [str(ROOT / "composer_jax" / "data")]
    prepare(sources, str(folder / "data"), folder / "shards", PrepareConfig(heldout_fraction=0.1))
    (folder / "config.py").write_text(PREPARED_CONFIG.format(path=str(folder / "shards")))
    return f"--config={folder / 'config.py'}", *CONFIG[1:]


def train_alone(config: tuple[str, ...], workdir: Path) -> None:
    """launch.pretrain in this process, with its eight devices."""
    parsed, _ = flags.parse(["launch.pretrain", *config, f"--workdir={workdir}"])
    with Run(parsed, workdir) as run:
        pretrain(run)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, config):
    """The folder of a run of one process."""
    workdir = tmp_path_factory.mktemp("runs") / "alone"
    train_alone(config, workdir)
    rows = [row for row in read_metrics(workdir / "metrics" / "pretrain.jsonl") if "heldout_prepared_nll" in row]
    assert rows, "the shards were read"
    return workdir


@pytest.mark.slow
def test_two_processes_that_share_a_bucket_train_as_one(tmp_path, bucket_url, start_two, alone, config):
    """Neither reads the other's disk: each has a mirror of its own."""
    (_, first), (_, second) = ends(start_two("pretrain", *config, f"--workdir={bucket_url}"))
    assert f"{STEPS}/{STEPS} step" in first and "step" not in second, "the first shows progress"
    bucket = BucketFolder(bucket_url)
    assert {"config.json", "stages/pretrain.json", "data/tokenizer.json"} <= bucket.list().keys()
    assert bucket.read(".lock") is None
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "pretrain.jsonl").write_bytes(bucket.read("metrics/pretrain.jsonl")[0])
    np.testing.assert_allclose(measured(tmp_path), measured(alone), rtol=1e-6)
    ours, theirs = weights(bucket_url), weights(alone)
    assert max(jax.tree.leaves(jax.tree.map(relative_error, ours, theirs))) < 1e-5


@pytest.mark.slow
def test_an_interrupt_of_one_stops_both_and_one_process_goes_on(tmp_path, start_two, alone, config):
    workdir = tmp_path / "run"
    both = start_two("pretrain", *config, f"--workdir={workdir}")
    metrics, deadline = workdir / "metrics" / "pretrain.jsonl", time.monotonic() + 900
    while len(read_metrics(metrics)) < 2:  # the rows of step 0 and of step 1: most steps are still to come
        assert [process.poll() for process in both] == [None, None] and time.monotonic() < deadline
        time.sleep(0.02)
    both[1].send_signal(signal.SIGTERM)
    for _, err in ends(both, 130):
        assert "the same command continues" in err and "Traceback" not in err
    assert not (workdir / "stages" / "pretrain.json").exists()
    with CheckpointStore(workdir / "checkpoints" / "pretrain") as store:
        assert store.latest_step() == read_metrics(metrics)[-1]["step"] < STEPS
    train_alone(config, workdir)
    assert_same(workdir, alone)


@pytest.mark.slow
def test_two_processes_score_as_one(tmp_path, start_two, alone):
    tokens, checkpoint = str(tmp_path / "tokens.npy"), str(alone / "checkpoints" / "pretrain")
    np.save(tokens, np.random.default_rng(0).integers(9, 512, (5, 20)))
    axes = dict.fromkeys(("data", "expert", "context", "tensor"), 1)
    options = dict(text=None, logits=True, dtype="float32", rows=1, window=20, axes=axes)
    score_files(checkpoint, str(tmp_path / "one.npz"), tokens=tokens, **options)
    arguments = f"--checkpoint={checkpoint}", f"--tokens={tokens}", "--logits"
    outs = [(f"--out={tmp_path / name}",) for name in ("two.npz", "nobody.npz")]
    (first, _), (second, _) = ends(start_two("score", *arguments, "--expert=2", own=outs))
    assert '"nll"' in first and '"nll"' not in second and not (tmp_path / "nobody.npz").exists()
    with np.load(tmp_path / "one.npz") as one, np.load(tmp_path / "two.npz") as two:
        assert set(two) == {"logprobs", "logits"}
        for name in two:
            np.testing.assert_allclose(two[name], one[name], atol=1e-5)


@pytest.mark.slow
def test_folders_that_differ_end_both_with_the_sentence_of_the_one_who_sees_it(tmp_path, start_two):
    own = [(f"--workdir={tmp_path / name}",) for name in ("a", "b")]
    (_, first), (_, second) = ends(start_two("pretrain", *CONFIG, own=own), 2)
    sentence = f"{tmp_path / 'b'} on {socket.gethostname()} is not the folder that process 0 works in"
    assert f"launch.pretrain: process 1 ended: {sentence}" in first and f"launch.pretrain: {sentence}" in second
    assert "Traceback" not in first + second


def test_the_pipeline_as_one_of_several_is_refused_before_anything_is_written(tmp_path, start):
    ((_, err),) = ends([start("pipeline", *CONFIG, f"--workdir={tmp_path / 'run'}", *of_two(0, 1))], 2)
    assert err.strip().endswith(
        "launch.pipeline supports one process only for now, and there are 2; start it on one host."
    )
    assert not (tmp_path / "run").exists()
