"""How fast pretraining data is prepared and read: `python -m benchmarks.input_pipeline [SOURCE ...]`.

The sources are this checkout, the standard library of the running Python and three installed packages, or those named.
Without --tokenizer, one of ours with 32,768 ids is trained on them first, which is not measured. Prints progress on
stderr and, as the last line of stdout, one JSON object:
    mb_per_s_per_core           megabytes of source per second and worker, from listing the files to the index
    filters_mb_per_s_per_core   the same of reading, filters and exact duplicates alone, in one process
    mb_per_cpu_s, filters_mb_per_cpu_s   the same per second of processor time, which depends less on other work of the
                                machine
    mb, files                   what was read: files that are left out for their path or size do not count
    tokens                      ids in the shards
    kept_mb                     megabytes of files in the shards
    peak_mb_per_worker          most memory of a worker process
    workers
    wait_fraction               share of a training step that the loop waits for its batch: the network and batches of
                                configs/tiny.py, on shards of this checkout with a tokenizer of the network's size
"""

import argparse
import itertools
import json
import os
import resource
import sys
import sysconfig
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.data.corpus import find_corpus, read_texts
from composer_jax.data.pipeline import BatchStream
from composer_jax.data.prepare.config import PrepareConfig
from composer_jax.data.prepare.duplicates import find_duplicates
from composer_jax.data.prepare.filter_unit import filter_unit
from composer_jax.data.prepare.plan import read_unit, unit_file, write_units
from composer_jax.data.prepare.prepare import prepare
from composer_jax.data.prepare.statistics import Tally
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax", "numpy", "matplotlib")


def default_sources() -> list[str]:
    """Returns this checkout, the standard library and PACKAGES."""
    packages = Path(sysconfig.get_path("purelib"))
    return [str(ROOT), sysconfig.get_path("stdlib"), *(str(packages / name) for name in PACKAGES)]


def train_tokenizer(sources: list[str], folder: Path, vocab_size: int = 32_768) -> str:
    """Trains a tokenizer on up to 4 MB of Python of each source, and returns its folder."""
    files = itertools.chain.from_iterable(
        read_texts(find_corpus(source, max_bytes=4_000_000, heldout_fraction=0).train) for source in sources
    )
    Tokenizer.train(files, vocab_size).save(folder / "tokenizer.json")
    return str(folder)


def measure_filters(sources: list[str], config: PrepareConfig, out: Path) -> dict[str, float]:
    """Returns the speed of reading, filters and exact duplicates in this process."""
    config = replace(config, near_duplicates=0.0)
    started, cpu = time.perf_counter(), _cpu_seconds()
    units = len(write_units(sources, config, out))
    filtered = [filter_unit(read_unit(unit_file(out, number)), config) for number in range(units)]
    digests, heldout = (np.concatenate([getattr(one, name) for one in filtered]) for name in ("digests", "heldout"))
    find_duplicates(digests, np.concatenate([one.signatures for one in filtered]), heldout, 0.0)
    seconds, cpu_seconds = time.perf_counter() - started, _cpu_seconds() - cpu
    tally = Tally()
    for one in filtered:
        tally.merge(one.tally)
    mb = tally.total("read")[1] / 1e6
    return {"filters_mb_per_s_per_core": mb / seconds, "filters_mb_per_cpu_s": mb / cpu_seconds}


def measure_all(sources: list[str], tokenizer: str, config: PrepareConfig, out: Path, workers: int) -> dict[str, float]:
    """Returns the speed of the whole preparation, and what it read and wrote."""
    started, cpu = time.perf_counter(), _cpu_seconds()
    index = prepare(sources, tokenizer, out, config, workers)
    seconds, cpu_seconds = time.perf_counter() - started, _cpu_seconds() - cpu
    tally = Tally(index["statistics"])
    files, num_bytes = tally.total("read")
    return {
        "mb_per_s_per_core": num_bytes / 1e6 / seconds / workers,
        "mb_per_cpu_s": num_bytes / 1e6 / cpu_seconds,
        "mb": num_bytes / 1e6,
        "files": files,
        "tokens": index["train"]["tokens"] + index["heldout"]["tokens"],
        "kept_mb": tally.total("languages")[1] / 1e6,
        "peak_mb_per_worker": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3,
        "workers": workers,
    }


def measure_wait(folder: Path, steps: int) -> float:
    """Returns the part of the time of a training step that the loop waits for its batch, after the first ten steps."""
    # Imported here, because the workers that prepare data import this module and need no JAX.
    from composer_jax.checkpoint.store import CheckpointStore
    from composer_jax.data.chat.load_chat_format import load_tokenizer
    from composer_jax.data.pipeline import pretraining_batches
    from composer_jax.data.sources import SourceConfig, make_sources
    from composer_jax.data.token_source import SourceInputs
    from composer_jax.observe.metrics import MetricsWriter
    from composer_jax.stages.run import Run
    from composer_jax.train.loop import FitPlan, fit
    from configs.tiny import get_config

    config: Any = get_config()  # Any: a ConfigDict types its fields as plain values
    config.pretrain.steps = steps
    tokenizer = train_tokenizer([str(ROOT)], folder / "tokenizer", config.model.vocab_size)
    prepare([str(ROOT)], tokenizer, folder / "shards", PrepareConfig(), 1)
    source = SourceConfig("prepared", options={"path": str(folder / "shards")})
    sources = make_sources({"shards": source}, SourceInputs([], load_tokenizer(tokenizer), 0))
    with Run(config, folder / "run") as run:
        plan = run.config.pretrain
        rows = pretraining_batches(sources, seq_len=plan.seq_len, batch_size=plan.batch_size, seed=0)
        stream: Any = TimedStream(rows)  # Any: fit asks for a BatchStream
        learner = run.model.learner("pretrain")
        state = learner.init_state(*run.model.initial_weights())
        with CheckpointStore(folder / "checkpoints") as store, MetricsWriter(folder / "metrics.jsonl") as metrics:
            fit(learner, state, stream, FitPlan("train", steps, steps, steps), store=store, metrics=metrics)
    times = np.asarray(stream.times)
    return float(np.diff(times[10:], axis=1).sum() / (times[-1, 1] - times[10, 0]))


class TimedStream:
    """A BatchStream that notes when each of its batches was asked for and when it came."""

    def __init__(self, stream: BatchStream) -> None:
        self._stream: BatchStream = stream
        self.times: list[tuple[float, float]] = []
        self.get_state, self.set_state = stream.get_state, stream.set_state

    def __next__(self):
        started = time.perf_counter()
        batch = next(self._stream)
        self.times.append((started, time.perf_counter()))
        return batch


def _cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="folders, or files of rows")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=60, help="training steps in which the wait is measured")
    parser.add_argument("--commits", type=int, default=0, help="newest commits of each git repository")
    options = parser.parse_args()
    sources = options.sources or default_sources()
    config = PrepareConfig(commits=options.commits)
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer = options.tokenizer or train_tokenizer(sources, Path(folder) / "tokenizer")
            figures = measure_all(sources, tokenizer, config, Path(folder) / "all", options.workers)
            figures |= measure_filters(sources, config, Path(folder) / "filters")
            figures["wait_fraction"] = measure_wait(Path(folder) / "training", options.steps)
        except UserError as error:
            sys.exit(str(error))
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
