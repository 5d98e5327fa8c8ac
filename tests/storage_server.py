"""The server of tests/storage_emulator.py: gcp-storage-emulator, and what it lacks for our locks.

It keeps objects but ignores the conditions of requests (ifGenerationMatch, generation), on which locks in buckets rely,
and leaves the generation out of downloads, from which TensorStore takes it for its next conditional write. The classes
below add both. The server handles one request at a time, so a condition and the write that it guards are one step, as
in the real service.
"""

import functools
import http.server
import logging
import sys
from urllib.parse import parse_qs, urlparse

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage


class PreconditionFailed(Exception):
    """The object has another generation than the request names."""


class ConditionalStorage(Storage):
    """Objects that are written, deleted and read under the conditions of the request that is being handled."""

    def __init__(self):
        super().__init__(use_memory_fs=True)
        self.conditions: dict[str, list[str]] = {}  # the query of the request
        self.generation: str | None = None  # of the object that it reads
        self._uploads: dict[str, dict[str, list[str]]] = {}  # the query that began an upload in parts

    def create_file(self, bucket_name, file_name, content, file_obj, file_id=None):
        self._check(bucket_name, file_name, self._uploads.get(file_id, self.conditions))
        super().create_file(bucket_name, file_name, content, file_obj, file_id)

    def create_resumable_upload(self, bucket_name, file_name, file_obj):
        self._check(bucket_name, file_name, self.conditions)
        file_id = super().create_resumable_upload(bucket_name, file_name, file_obj)
        self._uploads[file_id] = self.conditions
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

    def _check(self, bucket, name, conditions):
        current = self.objects.get(bucket, {}).get(name, {}).get("generation", "0")
        if conditions.get("ifGenerationMatch", [current]) != [current]:
            raise PreconditionFailed


class Handler(RequestHandler):
    """Hands the conditions of a request to the storage, and its answer to the client."""

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


def main(bucket: str) -> None:
    """Serves an empty bucket until the process is killed; the first line on stdout is the URL."""
    logging.disable(logging.CRITICAL)
    storage = ConditionalStorage()
    buckets.create_bucket(bucket, storage)
    server = http.server.HTTPServer(("127.0.0.1", 0), functools.partial(Handler, storage))
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
