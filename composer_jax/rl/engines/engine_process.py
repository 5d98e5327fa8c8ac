"""EngineProcess: an engine (launch.serve --engine_port) as a child of this process, which ends with it."""

import collections
import concurrent.futures
import dataclasses
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from composer_jax.checkpoint.weight_chain import ChainFiles
from composer_jax.errors import BAD_INPUT, UserError

LEARNERS_AT = ", for learners on "
"""What stands before HOST:PORT at the end of the line that a server prints when it serves (stages/serve.py)."""
VISIBLE_S = 20.0
"""Seconds in which what the learner has written gets visible in a folder on a shared disk."""
LAST_LINES = 20
"""Lines of the process that are kept to say why it has ended."""

# The signal stays across exec; the kernel sends it when the thread ends that has started the process.
_END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class EngineEnded(Exception):
    """The process has ended, and may be started again; the text says how, as the rest of a sentence."""


@dataclasses.dataclass(frozen=True)
class EngineCommand:
    """What an engine is started with, on whatever machine."""

    folder: str
    """Of the versions that it follows: an absolute path or a URL."""
    options: tuple[str, ...]
    """Flags of launch.serve beside those of folder, address and secrets."""
    token: str
    """What learners must know."""
    program: tuple[str, ...] = ("-m", "launch.serve")
    """Arguments of Python before the flags."""


class EngineProcess:
    """`start` and `wait` are called once each, from a thread that stays: the process ends with it."""

    def __init__(self, command: EngineCommand, host: str) -> None:
        """host: address of this machine at which the engine listens."""
        self._command, self._host = command, host
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._address: concurrent.futures.Future[str | None] = concurrent.futures.Future()

    def start(self) -> str:
        """Returns HOST:PORT when the engine serves; the system chooses the port.

        The environment is that of this process, with what Ray sets for the devices that it may see.

        Raises UserError for a folder without versions and for what launch.serve refuses, and EngineEnded.
        """
        _require_versions(self._command.folder, self._host)
        with tempfile.TemporaryDirectory() as private:
            token_file = Path(private) / "token"
            token_file.write_text(self._command.token, encoding="utf-8")
            program = [*self._command.program, *self._flags(token_file)]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _END_WITH_PARENT, str(os.getpid()), *program],
                env=os.environ | {"PYTHONPATH": _import_path()},
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            self._reading = threading.Thread(target=self._read, daemon=True)
            self._reading.start()
            address = self._address.result()
        if address is None:
            self.wait()
            raise AssertionError("wait raises")
        return address

    def wait(self) -> None:
        """Waits until the process has ended, and raises UserError or EngineEnded."""
        code = self._process.wait()
        self._reading.join()
        last = next((line.strip() for line in reversed(self._lines) if line.strip()), "it has said nothing")
        if code == BAD_INPUT:
            raise UserError(re.sub(r"^launch\.\w+: ", "", last))
        raise EngineEnded(f"its process has ended with exit code {code}: {last}")

    def _flags(self, token_file: Path) -> list[str]:
        return [
            f"--checkpoint=patches:{self._command.folder}",
            f"--host={self._host}",
            "--port=0",
            f"--api_key={secrets.token_hex(32)}",  # nobody knows it: learners alone are let in
            "--engine_port=0",
            f"--token_file={token_file}",
            "--processes=1",  # a pod's environment would make it one of several
            *self._command.options,
        ]

    def _read(self) -> None:
        assert self._process.stderr is not None, "it is a pipe"
        for line in self._process.stderr:
            sys.stderr.write(line)
            self._lines.append(line)
            if (found := re.search(rf"{LEARNERS_AT}(\S+)$", line)) and not self._address.done():
                self._address.set_result(found[1])
        if not self._address.done():
            self._address.set_result(None)


def _require_versions(folder: str, host: str) -> None:
    """Raises UserError if this machine sees no version in the folder that the learner has written to."""
    deadline, why = time.monotonic() + VISIBLE_S, "it has none"
    while True:
        try:
            if ChainFiles(folder).versions():
                return
        except Exception as error:  # file systems of buckets raise exceptions of their own types
            why = f"{type(error).__name__}: {error}"
        if time.monotonic() > deadline:
            raise UserError(
                f"{host} reads no version of the weights in rl.publish={folder} ({why}); use a folder or URL that all "
                "nodes of the cluster see under the same name, such as one on a shared disk or in a bucket."
            )
        time.sleep(VISIBLE_S / 20)


def _import_path() -> str:
    """Returns a PYTHONPATH with the folder of this package, whose launch.serve the process runs."""
    root = str(Path(__file__).resolve().parents[3])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
