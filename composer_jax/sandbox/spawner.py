"""The host's connection to the zygote of a pool: starts it, asks for sandboxes, ends them."""

import json
import logging
import os
import socket
import subprocess
import tempfile
import weakref
from typing import Any

from composer_jax.errors import UserError
from composer_jax.sandbox import backend as backends
from composer_jax.sandbox.inside import disk, frames, seccomp
from composer_jax.sandbox.limits import SandboxLimits
from composer_jax.sandbox.tree import EMPTY_PLAN

END_S = 30.0  # longest the launcher may take to kill what is left and to remove its files; usually below 0.1 s
START_S = 20.0  # longest the zygote may take to be ready; it needs about 0.1 s


def start(name: str, limits: SandboxLimits, trees: str, overlays: bool, network: bool) -> "Spawner":
    """Starts the first zygote of the backend called `name`.

    "auto" is bubblewrap, or Landlock with a warning where bubblewrap is missing or refused. Raises UserError when this
    machine refuses both, or bubblewrap for a pool with network, which Landlock cannot give.
    """
    try:
        backend = backends.choose("bubblewrap" if name == "auto" else name, trees, network)
        return Spawner(backend, limits, trees, overlays)
    except backends.BackendRefused as error:
        if name != "auto":
            raise
        first = error
    if network:
        ways = f"{first.fix}, or choose the backend 'subprocess' to go without isolation"
        raise UserError(f"{first.why}. Landlock cannot give sandboxes the network instead. {ways}.")
    try:
        started = Spawner(backends.choose("landlock", trees, network), limits, trees, overlays)
    except backends.BackendRefused as second:
        ways = f"{first.fix}; or: {second.fix}; or choose the backend 'subprocess' to go without isolation"
        raise UserError(f"{first.why}. {second.why}. {ways}.") from None
    sentence = "%s, so sandboxes use Landlock, which is weaker: %s; for the stronger isolation: %s."
    logging.getLogger(__name__).warning(sentence, first.why, backends.landlock_lacks(), first.fix)
    return started


class Spawner:
    """One zygote. Methods do not block and need no event loop; threads may call them one at a time."""

    def __init__(self, backend: backends.Backend, limits: SandboxLimits, trees: str, overlays: bool):
        """Starts the zygote and waits until it is ready. Raises UserError when this machine does not allow it."""
        self.backend = backend
        needs_scratch = backend.isolation == "none"
        self._scratch = tempfile.TemporaryDirectory(prefix="composer-sandboxes-") if needs_scratch else None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            backend.command,
            env=backend.environment,
            cwd="/",
            stdin=theirs.fileno(),
            stdout=self._output,
            stderr=self._output,
        )
        theirs.close()
        weakref.finalize(self, _end, self._control, self._process)
        config = {
            "isolation": backend.isolation,
            "limits": limits.as_bytes(),
            "filter": seccomp.assemble(os.uname().machine).hex(),
            "scratch": self._scratch.name if self._scratch else "",
            "trees": trees,
            "overlays": overlays,
        }
        if (refusal := self._greet(config) or self._probe()) is not None:
            self.close()
            raise backends.diagnose(backend.name, refusal)

    def _greet(self, config: dict) -> str | None:
        """Sends the configuration and waits for the zygote; returns the output of the launcher if it fails."""
        try:
            self._control.settimeout(START_S)
            self._control.send(json.dumps(config).encode())
            ready = self._control.recv(16) == b"ready"
            self._control.settimeout(None)
        except OSError:
            ready = False
        return None if ready else self.output()

    def _probe(self) -> str | None:
        """Builds one sandbox and ends it, so that a refusal of this machine shows at once; returns the reason."""
        try:
            with self.spawn("first", EMPTY_PLAN) as channel:
                channel.settimeout(START_S)
                answer = frames.receive(channel)
                self.kill("first")
        except OSError as error:
            return str(error)
        return answer[0].get("broken") if answer else "its worker ended at once"

    @property
    def pid(self) -> int:
        """Pid of the launcher, whose descendants are all processes of the pool."""
        return self._process.pid

    def is_alive(self, patience_s: float = 0.0) -> bool:
        """Whether the zygote runs and does not end within `patience_s` seconds."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return True
        return False

    def output(self) -> str:
        """The first 4096 bytes that bubblewrap and the zygote printed."""
        self._output.seek(0)
        return self._output.read(4096).decode(errors="replace")

    def spawn(self, name: str, plan: dict[str, Any]) -> socket.socket:
        """Asks for a sandbox with this plan (MountPlan.to_json); returns the non-blocking socket of its worker.

        Raises OSError when the zygote has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            order = f"+{name} {json.dumps(plan)}"
            socket.send_fds(self._control, [order.encode()], [theirs.fileno()])
        return ours

    def kill(self, name: str) -> None:
        """Ends the sandbox of that name and every process in it."""
        self._order("-", name)

    def freeze_layer(self, name: str) -> None:
        """Ends the sandbox of that name and keeps its changes as a layer."""
        self._order("=", name)

    def drop_layer(self, name: str) -> None:
        """Deletes a layer."""
        self._order("~", name)

    def _order(self, kind: str, name: str) -> None:
        try:
            self._control.send(f"{kind}{name}".encode())
        except OSError:
            return  # the zygote has ended, and every sandbox and layer with it

    def close(self) -> None:
        """Ends the zygote and all its sandboxes; returns when they have ended."""
        _end(self._control, self._process)
        if self._scratch and os.path.isdir(self._scratch.name):
            disk.remove_contents(self._scratch.name)  # also folders nested deeper than cleanup() reaches
            self._scratch.cleanup()


def _end(control: socket.socket, process: subprocess.Popen) -> None:
    try:
        control.send(b"!")
    except OSError:  # it is gone, or has ended this way already
        pass
    control.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
