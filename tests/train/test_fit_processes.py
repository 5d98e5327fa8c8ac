"""fit() on prepared shards: processes that read their own rows train like one that reads all, and resume each other."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.data.packing import UNREAD
from composer_jax.data.pipeline import pretraining_batches
from composer_jax.data.prepare.shards import ShardedDocuments, record_counts, write_shard
from composer_jax.data.prepared import PreparedSource
from composer_jax.data.token_source import DocumentSource
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.observe.metrics import MetricsWriter, read_metrics
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.processes import process_index
from composer_jax.train import loop
from composer_jax.train.learner import Learner
from composer_jax.train.loop import FitPlan, fit, require_same_batch
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from composer_jax.train.shard_batch import addressable_rows, micro_batches
from tests.models.small import random_weights, relative_error
from tests.parallel.test_processes import run_together
from tests.train.small_step import CONFIG

S, B, EOD = 32, 4, 2
# A small rate and a large eps: with others, training amplifies rounding within a few steps.
OPTIMIZER = make_optimizer(OptimizerConfig(peak=5e-3, eps=1e-3), steps=6)
LENGTHS = np.random.default_rng(0).integers(2, 3 * S, 40).astype(np.uint32)
DOCUMENTS = [np.random.default_rng(n).integers(9, 64, length).astype("<u2") for n, length in enumerate(LENGTHS)]


def stream(shards, read_rows=None):
    """Rows of shards, which are written if the folder is missing, beside rows in memory."""
    if not shards.exists():
        write_shard(shards / "a.array_record", DOCUMENTS)
    size = (shards / "a.array_record").stat().st_size
    shard = {"file": "a.array_record", "bytes": size, "records": int(record_counts(LENGTHS).sum())}
    documents = ShardedDocuments(shards, [shard], LENGTHS, np.dtype("<u2"))
    sources = {
        "prepared": (PreparedSource(documents, [], EOD, "fingerprint"), 0.7),
        "memory": (DocumentSource([np.full(50, 3)], EOD), 0.3),
    }
    return pretraining_batches(sources, seq_len=S, batch_size=B, seed=0, read_rows=read_rows)


class Recorder:
    """A stream that writes the token ids of its batches to a file, a line each."""

    def __init__(self, inner, path):
        self.inner, self.path = inner, path
        self.get_state, self.set_state = inner.get_state, inner.set_state

    def __next__(self):
        batch = next(self.inner)
        with self.path.open("a") as file:
            file.write(json.dumps(batch.tokens.tolist()) + "\n")
        return batch


def train(folder, steps, mesh):
    """Trains until `steps`, continuing from the checkpoint in the folder, with shards beside the folder."""
    learner = Learner(ModelDef(CONFIG), OPTIMIZER, LanguageLoss(), mesh)
    rows = Recorder(
        stream(folder.parent / "shards", addressable_rows(mesh, B)), folder / f"rows-{process_index()}.jsonl"
    )
    metrics = MetricsWriter(folder / f"metrics-{process_index()}.jsonl")
    with CheckpointStore(folder / "checkpoints") as store, metrics:
        fit(
            learner,
            learner.init_state(*random_weights(CONFIG)),
            rows,
            FitPlan("test", steps, save_every=3, evaluate_every=1),
            store=store,
            metrics=metrics,
        )


def train_two(folder, steps, axis):
    """`train` in two processes on a mesh with two devices along an axis. Returns the rows that each read."""
    codes, outputs = run_together("tests.train.prepared_process", str(folder), str(steps), axis)
    assert codes == [0, 0], "\n".join(outputs)[-4000:]
    lines = [(folder / f"rows-{process}.jsonl").read_text().splitlines() for process in range(2)]
    return [np.asarray([json.loads(line) for line in of_one]) for of_one in lines]


def merged(parts):
    """Rows of all processes, [steps,B,S]; those that none read are UNREAD."""
    return np.where(parts[0] == UNREAD, parts[1], parts[0])


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of a run in one process to step 6, and beside it one to step 3."""
    parent = tmp_path_factory.mktemp("runs")
    folder = parent / "one"
    folder.mkdir()
    stream(parent / "shards")
    train(folder, 3, make_mesh(jax.devices()[:1]))
    (folder / "rows-0.jsonl").unlink()
    shutil.copytree(folder, parent / "one-at-3")
    train(folder, 6, make_mesh(jax.devices()[:1]))
    return folder


def assert_trained_alike(folder, expected):
    rows = [read_metrics(path / "metrics-0.jsonl") for path in (folder, expected)]
    assert [row["step"] for row in rows[0]] == list(range(1, 7))
    assert [row["tokens"] for row in rows[0]] == [row["tokens"] for row in rows[1]]
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        np.testing.assert_allclose(*([row[name] for row in of_run] for of_run in rows), rtol=tolerance)
    restored = []
    for path in (folder, expected):
        with CheckpointStore(path / "checkpoints") as store:
            assert store.latest_step() == 6
            like = {"params": jax.eval_shape(lambda: random_weights(CONFIG)[0])}
            restored.append(store.restore(like=like)[0]["params"])
    for weights in zip(*map(jax.tree.leaves, restored), strict=True):
        assert relative_error(*weights) < 1e-5


@pytest.mark.slow
def test_two_processes_read_half_each_and_one_continues(one):
    folder = one.parent / "two"
    folder.mkdir()
    parts = train_two(folder, 3, "data")
    whole = stream(one.parent / "shards")
    expected = np.stack([next(whole).tokens for _ in range(6)])
    np.testing.assert_array_equal(merged(parts), expected[:3])
    for part, others in zip(parts, (slice(2, B), slice(2)), strict=True):
        from_shards = (expected[:3, others] > EOD + 1).any(-1)
        np.testing.assert_array_equal((part[:, others] == UNREAD).all(-1), from_shards)
        assert from_shards.any()
    (folder / "rows-0.jsonl").unlink()
    train(folder, 6, make_mesh(jax.devices()[:1]))
    resumed = [json.loads(line) for line in (folder / "rows-0.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal(resumed, expected[3:])
    assert_trained_alike(folder, one)


@pytest.mark.slow
def test_two_processes_continue_a_run_of_one(one):
    folder = one.parent / "context"
    shutil.copytree(one.parent / "one-at-3", folder)
    parts = train_two(folder, 6, "context")
    expected = [json.loads(line) for line in (one / "rows-0.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal(merged(parts), expected)
    assert not any((part == UNREAD).any() for part in parts), "both processes hold some positions of every row"
    assert_trained_alike(folder, one)


def test_one_process_holds_all_rows():
    for mesh in (make_mesh(jax.devices()[:1]), make_mesh(jax.devices()[:4], data=2, context=2)):
        assert addressable_rows(mesh, B) == set(range(B))
        assert addressable_rows(mesh, B, 2) == set(range(B))
    with pytest.raises(UserError, match="A batch of 3 rows does not divide over 2 devices"):
        addressable_rows(make_mesh(jax.devices()[:2], data=2), 3)


def test_a_process_holds_its_part_of_every_micro_batch(monkeypatch):
    mesh = make_mesh(jax.devices()[:2], data=2)
    first_half = lambda self, shape: {0: (slice(0, shape[0] // 2),)}  # noqa: E731
    monkeypatch.setattr(jax.sharding.NamedSharding, "addressable_devices_indices_map", first_half)
    batch = {"tokens": np.arange(8)[:, None]}
    held = [part["tokens"][:2, 0].tolist() for part in micro_batches(batch, 2)]
    assert addressable_rows(mesh, 8, 2) == {0, 1, 4, 5} == set(sum(held, []))


def test_token_ids_are_compared_where_both_processes_read_them(monkeypatch, tmp_path):
    rows = stream(tmp_path / "shards")
    batch = next(rows)
    read = np.arange(B)[:, None] < 2
    low, high = (dataclasses.replace(batch, tokens=np.where(of_one, batch.tokens, UNREAD)) for of_one in (read, ~read))
    sent = []
    for first, second in ((low, high), (low, batch), (batch, high), (batch, batch)):
        monkeypatch.setattr(loop, "broadcast_from_process0", lambda call: sent.append(call()) or sent[-1])
        require_same_batch(first, rows)
        monkeypatch.setattr(loop, "broadcast_from_process0", lambda call: json.loads(json.dumps(sent[-1])))
        require_same_batch(second, rows)
    for field in ("tokens", "segments", "weights"):
        changed = dataclasses.replace(batch, **{field: getattr(batch, field) + 1})
        with pytest.raises(UserError, match="makes other batches"):
            require_same_batch(changed, rows)
