"""benchmarks.compare_workdirs on small folders laid out like runs."""

import json
import logging

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compare_workdirs import main
from composer_jax.checkpoint.store import CheckpointStore


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_run(
    folder, *, loss=2.0, weight=1.0, moment=0.5, text="fixed", reward=1.0, seconds=1.0, order=(0, 1), stage="rl", step=3
):
    """A workdir with one trained stage and its episodes."""
    rows = [
        {"step": 1, "time": seconds, "loss": 3.0},
        {"step": 2, "time": 2 * seconds, "loss": loss, "step_s": seconds},
    ]
    write_lines(folder / "metrics" / f"{stage}.jsonl", rows)
    messages = [[{"kind": "assistant", "text": text, "tokens": 2, "sampled": True, "version": 0}]]
    episodes = [
        {"task_id": f"t{n}", "seed": n, "step": 1, "reward": reward, "parts": {}, "segments": messages} for n in (0, 1)
    ]
    write_lines(folder / "episodes" / f"{stage}.jsonl", [episodes[n] for n in order])
    params = {"up": jnp.array([weight, -4.0]), "layer": {"half": jnp.ones((2, 8), jnp.bfloat16)}}
    sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("data",)), jax.sharding.PartitionSpec("data"))
    with CheckpointStore(folder / "checkpoints" / stage) as store:
        store.save(step - 1, arrays={"params": params})
        store.save(step, arrays={"params": jax.device_put(params, sharding), "optimizer": {"mu": jnp.array([moment])}})


def compare(capsys, a, b, *flags):
    code = main([str(a), str(b), *flags])
    return code, capsys.readouterr().out.splitlines()


EQUAL = "rl: losses equal, tokens and rewards equal, weights equal bit for bit, optimizer state equal bit for bit"


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "a")
    return tmp_path / "a"


def test_times_and_the_order_of_episodes_do_not_count(tmp_path, capsys, run):
    write_run(tmp_path / "b", seconds=7.0, order=(1, 0))
    assert compare(capsys, run, tmp_path / "b") == (0, [EQUAL])


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"loss": 2.0000001}, "losses differ by at most 3.3e-08 (relative, at loss)"),
        ({"weight": 1.5}, "weights differ by at most 1.2e-01 (relative, at up)"),
        ({"weight": float("nan")}, "weights differ by at most inf (relative, at up)"),
        ({"moment": -0.5}, "optimizer state differ by at most 2.0e+00 (relative, at mu)"),
        ({"text": "broken"}, "of 2 episodes 2 differ in tokens and 0 in rewards"),
        ({"reward": 0.5}, "of 2 episodes 0 differ in tokens and 2 in rewards"),
        ({"order": (0,)}, "2 against 1 episodes"),
        ({"order": (0, 0)}, "other episodes were played"),
        ({"step": 4}, "checkpoints 3 ['optimizer', 'params'] against 4"),
    ],
)
def test_a_difference_is_named_and_fails(tmp_path, capsys, run, change, shown):
    write_run(tmp_path / "b", **change)
    code, (line,) = compare(capsys, run, tmp_path / "b")
    assert code == 1 and shown in line


def test_a_tolerance_accepts_small_differences_of_numbers_only(tmp_path, capsys, run):
    write_run(tmp_path / "b", loss=2.0000001, weight=1.0000001)
    assert compare(capsys, run, tmp_path / "b")[0] == 1
    assert compare(capsys, run, tmp_path / "b", "--tolerance=1e-6")[0] == 0
    write_run(tmp_path / "c", reward=1.0000001)
    assert compare(capsys, run, tmp_path / "c", "--tolerance=1e-6")[0] == 1


def test_a_stage_or_a_leaf_of_one_run_only_fails(tmp_path, capsys, run):
    write_run(tmp_path / "b")
    write_run(tmp_path / "b", stage="sft")
    code, lines = compare(capsys, run, tmp_path / "b", "--tolerance=1")
    assert code == 1 and lines == ["sft: metrics only in B, step only in B, episodes only in B", EQUAL]

    write_run(tmp_path / "c", step=2)
    with CheckpointStore(tmp_path / "c" / "checkpoints" / "rl") as store:
        store.save(3, arrays={"params": {"down": jnp.zeros(2)}, "optimizer": {"mu": jnp.array([0.5])}})
    code, (line,) = compare(capsys, run, tmp_path / "c", "--tolerance=1")
    assert code == 1 and "weights not comparable: down (only in B), layer.half (only in A), up (only in A)" in line


def test_a_folder_that_is_not_a_run_is_refused(tmp_path, capsys, run):
    with pytest.raises(SystemExit) as stopped:
        main([str(run), str(tmp_path)])
    assert stopped.value.code == 2 and "not a run's workdir" in capsys.readouterr().err


def test_logging_is_enabled_again(tmp_path, capsys, run, caplog):
    compare(capsys, run, run)
    logging.getLogger("here").error("heard")
    assert "heard" in caplog.text
