"""An emulator of Google Cloud Storage in a process of its own, for tests of runs in buckets.

gcp-storage-emulator keeps objects but ignores the conditions of requests (ifGenerationMatch, generation), on which our
locks rely, and leaves the generation out of downloads, from which TensorStore takes it for its next conditional write.
The server below, which `python -m tests.storage_emulator` runs, adds both. It serves one request at a time, so a
condition and the write that it guards are one step, as in the real service.

gcsfs and google-cloud-storage find it by STORAGE_EMULATOR_HOST, TensorStore (the arrays of Orbax) by
TENSORSTORE_GCS_HTTP_URL.
"""

import contextlib
import functools
import http.server
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlparse

BUCKET = "bucket"
ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def storage_emulator() -> Iterator[dict[str, str]]:
    """Runs an emulator with an empty BUCKET; yields the environment variables that lead to it."""
    command = [sys.executable, "-m", "tests.storage_emulator"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            assert url, "the emulator did not start"
            yield {
                "STORAGE_EMULATOR_HOST": url,
                "TENSORSTORE_GCS_HTTP_URL": url,
                # gcsfs would ask the real service, with credentials, what kind of bucket it is.
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
                # TensorStore would look for credentials and complain that there are none.
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            }
        finally:
            server.kill()


def serve() -> None:
    """Serves until the process is killed; the first line on stdout is the URL."""
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import buckets
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    class PreconditionFailed(Exception):
        pass

    class ConditionalStorage(Storage):
        conditions: dict[str, list[str]] = {}  # the query of the request that is being served
        generation: str | None = None  # of the object that it reads
        uploads: dict[str, dict[str, list[str]]] = {}  # the query that began an upload in parts

        def _check(self, bucket, name, conditions):
            current = self.objects.get(bucket, {}).get(name, {}).get("generation", "0")
            if conditions.get("ifGenerationMatch", [current]) != [current]:
                raise PreconditionFailed

        def create_file(self, bucket_name, file_name, content, file_obj, file_id=None):
            self._check(bucket_name, file_name, self.uploads.get(file_id, self.conditions))
            super().create_file(bucket_name, file_name, content, file_obj, file_id)

        def create_resumable_upload(self, bucket_name, file_name, file_obj):
            self._check(bucket_name, file_name, self.conditions)
            file_id = super().create_resumable_upload(bucket_name, file_name, file_obj)
            self.uploads[file_id] = self.conditions
            return file_id

        def delete_file(self, bucket_name, file_name):
            self._check(bucket_name, file_name, self.conditions)
            super().delete_file(bucket_name, file_name)

        def get_file_obj(self, bucket_name, file_name):
            found = super().get_file_obj(bucket_name, file_name)
            if self.conditions.get("generation", [found["generation"]]) != [found["generation"]]:
                raise NotFound
            self.generation = found["generation"]
            return found

    class Handler(RequestHandler):
        def handle_one_request(self):
            try:
                super().handle_one_request()
            except PreconditionFailed:
                self.send_error(412)
            except ConnectionError:
                self.close_connection = True  # the client was killed, or has read enough

        def parse_request(self):
            parsed = super().parse_request()
            self.storage.conditions = parse_qs(urlparse(self.path).query) if parsed else {}
            self.storage.generation = None
            return parsed

        def end_headers(self):
            if self.storage.generation is not None:
                self.send_header("x-goog-generation", self.storage.generation)
            super().end_headers()

    logging.disable(logging.CRITICAL)
    storage = ConditionalStorage(use_memory_fs=True)
    buckets.create_bucket(BUCKET, storage)
    server = http.server.HTTPServer(("127.0.0.1", 0), functools.partial(Handler, storage))
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    os.environ.pop("STORAGE_EMULATOR_HOST", None)
    serve()
