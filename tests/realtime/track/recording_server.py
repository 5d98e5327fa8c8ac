"""A real HTTP server that records what it is sent, and answers as a test wants."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class RecordingServer:
    """Attributes: answer: (status, body, headers) of the next answers; requests: (path, headers, body); received: set
    with the first request."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"
        self.answer: tuple[int, str, dict[str, str]] = (200, "{}", {})
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.received = threading.Event()

    def events(self) -> list[dict[str, Any]]:
        return [event for _, _, body in self.requests for event in json.loads(body)["events"]]


@contextmanager
def recording_server() -> Iterator[RecordingServer]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            recorder.requests.append((self.path, dict(self.headers), body))
            recorder.received.set()
            status, text, headers = recorder.answer
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(text))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST

        def log_message(self, *args):
            """Prints nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    recorder = RecordingServer(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield recorder
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
