"""A run whose folder, base and data are in a bucket: killed while it saves, continued, and equal to a local run."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from composer_jax.checkpoint.convert import convert
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.stages.report import report
from composer_jax.stages.run import Run
from composer_jax.storage.bucket import BucketFolder
from composer_jax.train.loop import STATE
from launch import flags
from tests.stages.base_model import write_base
from tests.stages.command_line import finish, kill_when, start

pytestmark = pytest.mark.slow

STEPS = 4
CONFIG = (
    "--config=configs/base.py:1024",
    "--config.mesh.cpu_devices=1",
    f"--config.sft.steps={STEPS}",
    "--config.sft.save_every=2",
    "--config.sft.batch_size=2",
    "--config.sft.seq_len=128",
    "--config.sft.bad_rows=drop",
)
CHANGING = ("time", "tokens_per_s")
"""Columns of metrics that two runs do not share."""


def write_conversations(file: Path) -> None:
    texts = [f"number {i} of {i % 7} and {i * i}" for i in range(40)]
    rows = [{"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}]} for t in texts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def upload(folder: Path, url: str) -> None:
    bucket = BucketFolder(url)
    for file in folder.iterdir():
        bucket.write(file.name, file.read_bytes(), 0)


def state(checkpoints: Path | str) -> dict[str, np.ndarray]:
    """The arrays of the latest checkpoint of SFT, as they are stored."""
    with CheckpointStore(checkpoints) as store:
        assert store.latest_step() == STEPS
        index = store._read_meta(STEPS)["arrays"]
        like = {name: {path: np.zeros(shape, dtype) for path, (shape, dtype) in index[name].items()} for name in STATE}
        arrays, _ = store.restore(like=like)
    return {f"{name} {path}": array for name in STATE for path, array in arrays[name].items()}


def metrics(text: str) -> list[dict]:
    rows = [json.loads(line) for line in text.splitlines()]
    return [{name: value for name, value in row.items() if name not in CHANGING} for row in rows]


def test_a_run_in_a_bucket_is_killed_while_it_saves_and_ends_like_a_local_one(bucket_url, tmp_path):
    write_base(tmp_path / "model")
    (tmp_path / "data").mkdir()
    write_conversations(tmp_path / "data" / "talk.jsonl")
    upload(tmp_path / "model", f"{bucket_url}/model")
    upload(tmp_path / "data", f"{bucket_url}/data")
    cache, local, url = tmp_path / "xla", tmp_path / "run", f"{bucket_url}/run"

    def sft(workdir, place) -> subprocess.Popen:
        fields = (f"--config.base=hf:{place}/model", f"--config.sft.data={place}/data/talk.jsonl")
        return start(workdir, *CONFIG, *fields, cache=cache, entry="launch.sft")

    alone = finish(sft(local, tmp_path))
    assert alone.returncode == 0, alone.stderr

    bucket = BucketFolder(url)
    first = sft(url, bucket_url)
    # Files of the second checkpoint are there, and what says that it is whole is not.
    kill_when(first, lambda: bool(bucket.list("checkpoints/sft/4/params/")))
    assert bucket.read("stages/sft.json") is None
    assert [row["step"] for row in metrics(bucket.read("metrics/sft.jsonl")[0].decode())] == [1, 2, 3, 4]
    # --workdir alone continues, and on the machine of the dead process at once.
    done = finish(start(url, cache=cache, entry="launch.sft"))
    assert done.returncode == 0, done.stderr
    assert f"/{STEPS} step" in done.stderr and "Traceback" not in done.stderr

    assert metrics(bucket.read("metrics/sft.jsonl")[0].decode()) == metrics((local / "metrics/sft.jsonl").read_text())
    ours, theirs = state(f"{url}/checkpoints/sft"), state(local / "checkpoints" / "sft")
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)

    config, _ = flags.parse(["launch.report", f"--workdir={url}"])
    with Run(config, url) as run:
        assert report(run) == f"{url}/report.html"
    assert len(bucket.read("report.html")[0]) > 10_000 and bucket.read(".lock") is None
    assert json.loads(bucket.read("results.json")[0])["sft"]["loss_last"] > 0
    assert bucket.list("plots/")

    convert(url, f"hf:{bucket_url}/agent")
    convert(str(local), f"hf:{tmp_path / 'agent'}")
    agent = BucketFolder(f"{bucket_url}/agent")
    assert {file.name: file.read_bytes() for file in (tmp_path / "agent").iterdir()} == {
        name: agent.read(name)[0] for name in agent.names()
    }
