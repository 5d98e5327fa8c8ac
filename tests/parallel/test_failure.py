"""How the process that hosts the coordinator waits for the exit of the others."""

import socket
import subprocess
import sys
import threading
import time

import pytest

from composer_jax.parallel import failure

CONNECTED = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"


@pytest.fixture
def coordinator(monkeypatch):
    """A listening socket of this process, which is connected to it, too."""
    with socket.socket(socket.AF_INET6) as server:
        server.bind(("::", 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setattr(failure, "coordinator_address", lambda: f"127.0.0.1:{port}")
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            yield server


def test_a_process_alone_waits_for_nobody(coordinator):
    failure._wait_until_disconnected(deadline=time.monotonic() + 600)


def test_a_connected_process_is_waited_for_until_it_exits(coordinator):
    port = str(coordinator.getsockname()[1])
    other = subprocess.Popen([sys.executable, "-c", CONNECTED, port], stdin=subprocess.PIPE)
    with coordinator.accept()[0]:
        failure._wait_until_disconnected(deadline=time.monotonic() + 0.1)
        assert other.poll() is None  # the deadline has passed, and it is connected still
        waiting = threading.Thread(target=failure._wait_until_disconnected, args=(time.monotonic() + 600,))
        waiting.start()
        other.communicate(b"")
        waiting.join(600)
        assert not waiting.is_alive() and other.returncode == 0
