"""SmolLM2-135M-Instruct as a GGUF file, fetched once into the user's cache."""

import os
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from launch import fetch_smollm2

FETCH_S = 120


def fetch() -> Path:
    """Returns the file in the folder COMPOSER_SMOLLM2, or in the user's cache; skips the test without it."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "composer_jax" / "smollm2"
    try:
        return fetch_smollm2.fetch(Path(os.environ.get("COMPOSER_SMOLLM2") or default), FETCH_S)
    except UserError as error:
        pytest.skip(str(error))
