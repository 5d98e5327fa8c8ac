"""Speed and memory of loading a checkpoint: `python -m benchmarks.load_hf [--gigabytes=8] [--folder=DIR]`.

Writes a synthetic bfloat16 checkpoint of Moonlight's shape (with the number of layers closest to the size) unless the
folder contains one, reads it once into the page cache, and then loads it in a new process. Prints progress on stderr
and, as the last line of stdout, one JSON object:
    gigabytes            size of the tensors
    save_mb_per_s, load_mb_per_s
    overhead_gb          peak memory of the loading process, minus that of the arrays and of a process that has only
                         imported JAX
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from composer_jax.checkpoint.huggingface import load_hf, save_hf
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from composer_jax.models.presets import PRESETS
from launch.huge_pages import restart_with_huge_pages


def config_of_size(gigabytes: float) -> ModelConfig:
    """Returns the config of Moonlight with the number of layers that is closest to a size."""
    config = dataclasses.replace(PRESETS["moonlight_16b_a3b"], param_dtype="bfloat16")
    sizes = [
        2 * ModelDef(dataclasses.replace(config, n_layers=n)).parameter_count() for n in range(2, config.n_layers + 1)
    ]
    layers = 2 + min(range(len(sizes)), key=lambda i: abs(sizes[i] - gigabytes * 1e9))
    return dataclasses.replace(config, n_layers=layers)


def random_weights(definition: ModelDef):
    """Returns NumPy arrays of a few kilobytes of repeated noise, which are fast to generate."""
    noise = np.random.default_rng(0).standard_normal(4099).astype(ml_dtypes.bfloat16)
    return jax.tree.map(lambda leaf: np.resize(noise, leaf.shape).astype(leaf.dtype), definition.shapes())


def peak_bytes() -> int:
    """Returns the peak memory of this program; getrusage would include the process that started it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def load(folder: Path) -> None:
    """Loads the folder and prints seconds and bytes as JSON; runs in a process of its own."""
    jax.block_until_ready(jax.numpy.zeros(1))
    before = peak_bytes()
    started = time.perf_counter()
    _, *weights = load_hf(folder)
    jax.block_until_ready(weights)
    seconds = time.perf_counter() - started
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    print(json.dumps({"seconds": seconds, "bytes": size, "overhead": peak_bytes() - before - size}))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the checkpoint (default: 8)")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint (default: a temporary one)")
    parser.add_argument("--load-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.load_only:
        return load(options.folder)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="load_hf-")) / "checkpoint"
    try:
        figures = {}
        if not (folder / "config.json").exists():
            definition = ModelDef(config_of_size(options.gigabytes))
            weights = random_weights(definition)
            started = time.perf_counter()
            save_hf(folder, definition, *weights)
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
            figures["save_mb_per_s"] = round(size / 1e6 / (time.perf_counter() - started), 1)
            del weights
        for file in folder.glob("*.safetensors"):
            with file.open("rb", buffering=0) as opened:
                while opened.read(2**24):
                    continue
        command = [sys.executable, "-m", "benchmarks.load_hf", "--load-only", f"--folder={folder}"]
        completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        loaded = json.loads(completed.stdout.splitlines()[-1])
    finally:
        if options.folder is None:
            shutil.rmtree(folder.parent, ignore_errors=True)
    figures = {
        "gigabytes": round(loaded["bytes"] / 1e9, 2),
        **figures,
        "load_mb_per_s": round(loaded["bytes"] / 1e6 / loaded["seconds"], 1),
        "overhead_gb": round(loaded["overhead"] / 1e9, 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    restart_with_huge_pages()  # like every entry point
    main()
