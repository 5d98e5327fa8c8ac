"""Starts an emulator of Google Cloud Storage (tests/storage_server.py) in a process of its own."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BUCKET = "bucket"
ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def storage_emulator() -> Iterator[dict[str, str]]:
    """Runs an emulator with an empty BUCKET; yields the environment variables that lead to it."""
    command = [sys.executable, "-m", "tests.storage_server", BUCKET]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            assert url, "the emulator did not start"
            yield {
                "STORAGE_EMULATOR_HOST": url,  # gcsfs and google-cloud-storage
                "TENSORSTORE_GCS_HTTP_URL": url,  # TensorStore, which writes the arrays of Orbax
                # gcsfs would ask the real service, with credentials, what kind of bucket it is.
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
                # TensorStore would look for credentials and complain that there are none.
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            }
        finally:
            server.kill()
