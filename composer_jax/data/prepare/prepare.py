"""Prepares pretraining data: sources -> shards of token ids with an index, resumable and in parallel."""

import functools
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.atomic_write import open_atomically, write_atomically
from composer_jax.data.prepare.config import PrepareConfig
from composer_jax.data.prepare.duplicates import check_library, find_duplicates
from composer_jax.data.prepare.filter_unit import FilteredUnit, filter_unit
from composer_jax.data.prepare.plan import read_unit, unit_file, write_units
from composer_jax.data.prepare.shards import RECORD_TOKENS, record_counts, token_dtype
from composer_jax.data.prepare.statistics import Tally, statistics_page
from composer_jax.data.prepare.tokenize_unit import SPLITS, cached_tokenizer, find_fim_ids, tokenize_unit
from composer_jax.errors import UserError
from composer_jax.observe.progress import Progress

PLAN, INDEX, PAGE, DUPLICATES = "plan.json", "index.json", "statistics.md", "duplicates.npz"
VERSION = 1


def prepare(
    sources: Sequence[str], tokenizer: str, out: Path | str, config: PrepareConfig | None = None, workers: int = 1
) -> dict[str, Any]:
    """Writes shards of token ids, their index and a page of statistics to the folder `out`; returns the index.

    A preparation that was stopped goes on where it was; one that is finished is returned. The result does not depend on
    `workers` or on interruptions.

    Args:
      sources: folders with source code, git repositories (also several in a folder), .jsonl and .parquet files.
      tokenizer: folder or URL of a tokenizer (tokenizer.json), that of the model to be trained.
      workers: processes, each of which takes one core and a few hundred megabytes.

    Raises UserError for a source or tokenizer that does not fit, nothing to train on, another preparation in `out`, or
    a full disk.
    """
    config, out = config or PrepareConfig(), Path(out)
    if workers < 1:
        raise UserError(f"workers={workers}; use at least 1")
    tok = cached_tokenizer(tokenizer)
    if config.fim_share > 0:
        find_fim_ids(tok, tokenizer)
    if config.near_duplicates > 0:
        check_library()
    sizes = _plan(list(sources), tok.fingerprint, config, out)
    if not (out / INDEX).exists():
        _run(functools.partial(_filter, config=config, out=out), "filter", sizes, out, workers)
        _find_duplicates(len(sizes), config, out)
        tokens = functools.partial(_tokenize, config=config, out=out, tokenizer=tokenizer)
        _run(tokens, "tokens", sizes, out, workers)
        _write_index(len(sizes), tok.fingerprint, token_dtype(tok.vocab_size), tokenizer, config, out)
    return json.loads((out / INDEX).read_text(encoding="utf-8"))


def _plan(sources: list[str], fingerprint: str, config: PrepareConfig, out: Path) -> list[int]:
    """Makes the plan, or reads it, and returns the bytes of each unit."""
    settings = json.loads(json.dumps({"sources": sources, "tokenizer": fingerprint, **asdict(config)}))
    path = out / PLAN
    if path.exists():
        plan = json.loads(path.read_text(encoding="utf-8"))
        for name in sorted(settings.keys() | plan["settings"].keys()):
            before, now = plan["settings"].get(name), settings.get(name)
            if before != now:
                raise UserError(
                    f"{out} was prepared with {name}={before}, not {now}; use the same value, or a new --out"
                )
        for partial in (*out.glob(".*.array_record.*"), *(out / "units").glob(".*")):
            partial.unlink()  # written by a process that was killed
        return plan["unit_bytes"]
    if out.exists() and any(entry.name != "units" for entry in out.iterdir()):
        raise UserError(f"--out={out} holds other files; name a folder that is empty or does not exist")
    if not sources:
        raise UserError("there is no source to prepare; name at least one folder or file as --source")
    sizes = write_units(sources, config, out)
    if not sizes:
        raise UserError(
            f"--source={','.join(sources)} holds no files; name a folder with source files, or a file with rows"
        )
    write_atomically(path, json.dumps({"version": VERSION, "settings": settings, "unit_bytes": sizes}).encode())
    return sizes


def _run(function: Callable[[int], None], step: str, sizes: Sequence[int], out: Path, workers: int) -> None:
    """Runs one step of all units that are not done."""
    missing = [number for number in range(len(sizes)) if not _step_file(out, number, step).exists()]
    done = sum(sizes) - sum(sizes[number] for number in missing)
    with Progress(sum(sizes), "bytes", {"filter": "filter", "tokens": "tokenize"}[step], initial=done) as progress:
        for number in _run_in_workers(function, missing, workers):
            progress.update(sizes[number])


def _step_file(out: Path, number: int, step: str) -> Path:
    """The result of a step of one unit; it exists when the step is done."""
    return unit_file(out, number).with_suffix({"filter": ".filter.npz", "tokens": ".tokens.json"}[step])


def _filter(number: int, config: PrepareConfig, out: Path) -> None:
    filter_unit(read_unit(unit_file(out, number)), config).save(_step_file(out, number, "filter"))


def _find_duplicates(units: int, config: PrepareConfig, out: Path) -> None:
    """Writes the verdicts on the candidates of all units, and where those of each unit end."""
    if (out / "units" / DUPLICATES).exists():
        return
    filtered = [FilteredUnit.load(_step_file(out, number, "filter")) for number in range(units)]
    counts = [len(unit.ordinals) for unit in filtered]
    verdicts = find_duplicates(
        np.concatenate([unit.digests for unit in filtered]),
        np.concatenate([unit.signatures for unit in filtered]),
        np.concatenate([unit.heldout for unit in filtered]),
        config.near_duplicates,
    )
    with open_atomically(out / "units" / DUPLICATES) as file:
        np.savez(file, verdicts=verdicts, ends=np.cumsum(counts))


def _tokenize(number: int, config: PrepareConfig, out: Path, tokenizer: str) -> None:
    with np.load(out / "units" / DUPLICATES) as saved:
        start, end = ([0, *saved["ends"]])[number : number + 2]
        verdicts = saved["verdicts"][start:end]
    unit, filtered = read_unit(unit_file(out, number)), FilteredUnit.load(_step_file(out, number, "filter"))
    result = tokenize_unit(unit, filtered, verdicts, tokenizer, config, out)
    write_atomically(_step_file(out, number, "tokens"), json.dumps(result).encode())


def _write_index(
    units: int, fingerprint: str, dtype: np.dtype, tokenizer: str, config: PrepareConfig, out: Path
) -> None:
    """Writes what is known of all documents, the page, and, when everything else is there, the index."""
    tally = Tally()
    results = []
    for number in range(units):
        tally.merge(FilteredUnit.load(_step_file(out, number, "filter")).tally)
        results.append(json.loads(_step_file(out, number, "tokens").read_text(encoding="utf-8")))
        tally.merge(Tally(results[-1].pop("tally")))
    if not tally.total("train")[1]:
        reasons = ", ".join(
            f"{count} {reason}" for reason, (count, _) in sorted(tally.tables.get("left out", {}).items())
        )
        raise UserError(
            f"--out={out} has nothing to train on (left out: {reasons or 'nothing'}; held out: the rest); name other "
            "sources and a new --out"
        )
    index: dict[str, Any] = {
        "version": VERSION,
        "tokenizer": {"fingerprint": fingerprint, "path": tokenizer},
        "dtype": dtype.str,
        "record_tokens": RECORD_TOKENS,
        "config": asdict(config),
        "statistics": tally.tables,
    }
    for split in SPLITS:
        index[split] = _write_documents([result[split] for result in results if result[split]], split, out)
    content = json.dumps([fingerprint, *(index[split]["shards"] for split in SPLITS)], sort_keys=True)
    index["fingerprint"] = hashlib.sha256(content.encode()).hexdigest()[:16]
    write_atomically(out / PAGE, statistics_page(tally, asdict(config), tokenizer).encode())
    write_atomically(out / INDEX, json.dumps(index, indent=1).encode())


def _write_documents(results: Sequence[dict[str, Any]], split: str, out: Path) -> dict[str, Any]:
    """Writes length and source of every document of a split, and returns the split's part of the index."""
    lengths = np.asarray([length for result in results for length in result["lengths"]], np.uint32)
    names = sorted({source for result in results for source in result["sources"]})
    number = {name: i for i, name in enumerate(names)}
    sources = np.asarray([number[source] for result in results for source in result["sources"]], np.uint16)
    with open_atomically(out / f"{split}.documents.npz") as file:
        np.savez(file, lengths=lengths, sources=sources)
    shards = [
        {"records": int(record_counts(np.asarray(result["lengths"])).sum())}
        | {name: result[name] for name in ("file", "bytes", "sha256")}
        for result in results
    ]
    return {"documents": len(lengths), "tokens": int(lengths.sum(dtype=np.int64)), "sources": names, "shards": shards}


def _run_in_workers(function: Callable[[int], None], numbers: Sequence[int], workers: int) -> Iterator[int]:
    """Calls function(number) in worker processes; yields each number when it is done, in any order.

    function: can be pickled. What it raises is raised here, and ends the other workers.

    Raises UserError when a worker process was killed.
    """
    if not numbers:
        return
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        min(workers, len(numbers)), multiprocessing.get_context("spawn"), initializer=_start_worker
    )
    try:
        # Ctrl-C reaches all processes; the first one ends the others, which inherit a blocked SIGINT from their start.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = {executor.submit(function, number): number for number in numbers}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for future in as_completed(futures):
            future.result()
            yield futures.pop(future)
        executor.shutdown()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, perhaps because the memory was full; continue with fewer --workers"
        ) from error
    finally:
        # After an error or Ctrl-C nobody needs the units in progress: their files appear when they are complete.
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        executor.shutdown(cancel_futures=True)


def _start_worker() -> None:
    # Each worker is one of several and has one core: the tokenizer and the MinHash library start no threads.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
