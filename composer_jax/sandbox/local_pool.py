"""A pool of local sandboxes: at most `size` in use, and a few kept ready."""

import asyncio
import itertools
import os
import shutil
import socket
import tempfile
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox.backend import WORKSPACE_PATHS
from composer_jax.sandbox.errors import SandboxDied
from composer_jax.sandbox.inside import layers
from composer_jax.sandbox.limits import SandboxLimits
from composer_jax.sandbox.local_sandbox import LocalSandbox
from composer_jax.sandbox.protocol import AsyncCloseable, Capabilities
from composer_jax.sandbox.spawner import Spawner, start
from composer_jax.sandbox.tree import EMPTY_PLAN, MAX_DEPTH, MountPlan, Tree, copy_folder
from composer_jax.sandbox.tree_cache import TreeCache

WARM = 8  # empty sandboxes kept ready: about 3 MB and no CPU time each
READY_S = 20.0  # longest a sandbox may take to start; usually milliseconds
END_S = 1.0  # longest between the end of the zygote's socket and of its process
START_ATTEMPTS = 3  # a failed start is tried twice more


class LocalSandboxPool(AsyncCloseable):
    """Hands out fresh sandboxes. Construct it anywhere, use it from one event loop at a time.

    The constructor raises UserError when this machine cannot build such sandboxes, and warns (RuntimeWarning) for the
    backend that isolates nothing.

    backend: "auto" is "bubblewrap" where the machine allows it, else "landlock", with a logged warning that says why
    and what is weaker. "subprocess" isolates nothing.

    overlays: False copies trees into workspaces, as without an overlay file system in the kernel.
    network: True allows acquire(network=True).
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        backend: str = "auto",
        size: int = 64,
        overlays: bool = True,
        network: bool = False,
    ):
        if size < 1:
            raise UserError(f"sandbox pool size is {size}; it must be at least 1")
        self.limits = limits or SandboxLimits()
        self.size = size
        self.network = network
        self._trees = tempfile.TemporaryDirectory(prefix="composer-trees-")
        if os.geteuid() == 0:  # the sandboxes that read it are not root
            os.chmod(self._trees.name, 0o755)
        with tempfile.TemporaryDirectory() as folder:  # for the zygote, which tests overlays on it
            Path(folder, "file").touch()
            copy_folder(Path(folder), Path(self._trees.name, layers.PROBE))
        self._overlays = overlays
        self.trees = TreeCache(self.tree)
        """The trees of folders that do not change, one for all callers."""
        self._numbers = itertools.count()
        self._warm: deque[LocalSandbox] = deque()
        self._used: set[LocalSandbox] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._spawner = start(backend, self.limits, self._trees.name, overlays, network)
        self._fill_warm()

    @property
    def backend(self) -> str:
        """The backend in use: "bubblewrap", "landlock" or "subprocess"."""
        return self._spawner.backend.name

    @property
    def launcher_pid(self) -> int:
        """Pid of the process whose descendants are all processes of this pool."""
        return self._spawner.pid

    @property
    def capabilities(self) -> Capabilities:
        """What the backend in use allows."""
        return Capabilities(
            can_snapshot=True,
            can_fork=self.size > 1,
            can_mount_packages=True,
            can_mount_tests=self._spawner.backend.isolation == "namespaces",
            can_use_network=self.network,
            can_set_output_limit=False,
            has_writable_system=False,
        )

    @property
    def image(self) -> str | None:
        """None: commands see the system of this machine."""
        return None

    @property
    def workspace_paths(self) -> tuple[str, ...]:
        """The absolute paths by which commands find the workspace."""
        return WORKSPACE_PATHS

    def tree(self, folder: Path | None = None) -> Tree:
        """Returns a pristine copy of a folder for any number of sandboxes; None: an empty one.

        Raises UserError when `folder` is not a folder, or cannot be read.
        """
        if folder is None:
            return Tree(self)
        name = str(next(self._numbers))
        copy = Path(self._trees.name, name)
        copy_folder(folder, copy)
        tree = Tree(self, base=name)
        weakref.finalize(tree, shutil.rmtree, copy, ignore_errors=True)
        return tree

    async def acquire(
        self,
        files: Mapping[str, bytes | str],
        tree: Tree | None = None,
        *,
        packages: Tree | None = None,
        tests: Tree | None = None,
        network: bool = False,
        grading: bool = False,
        solution: Tree | None = None,
    ) -> LocalSandbox:
        """Returns a fresh sandbox with `files` on top of `tree`; waits while `size` are in use. The caller closes it.

        packages: a folder that every Python inside can import from, mounted read-only at /opt/packages.
        tests: a folder that is mounted read-only at /tests, beside an empty, writable /logs/verifier.
        network: with the network of the host, its local services included. The pool must have been made with it.
        grading: changes nothing, since these sandboxes hide nothing.
        solution: a folder that is mounted read-only at /solution.

        Raises UserError for trees that cannot be mounted so, SandboxDied when three attempts failed or the snapshots of
        the tree were lost with the zygote that held them, SandboxFileError for a file that cannot be written.
        """
        plan = MountPlan(Tree(self) if tree is None else tree, packages, tests, network, solution)
        while len(self._used) >= self.size and not self._closed:
            await self._wait()
        for attempt in range(START_ATTEMPTS):
            if self._closed:
                raise RuntimeError("the sandbox pool is closed; make another one")
            try:
                sandbox = self._take_sandbox(plan)
            except BaseException:
                self._wake_next()  # another caller gets the place
                raise
            try:
                await sandbox.wait_ready(READY_S)
                if files:
                    await sandbox.write_files(files)
                return sandbox
            except SandboxDied:
                self._drop_warm()  # the cause may have killed them all
                if attempt + 1 == START_ATTEMPTS:
                    raise
            except BaseException:
                sandbox.end("its files could not be written")
                raise
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Ends every sandbox of this pool, used or not."""
        self.kill()

    def kill(self) -> None:
        """close() for callers outside a coroutine."""
        self._closed = True
        self._drop_warm()
        for sandbox in list(self._used):
            sandbox.end("its pool was closed")
        self._spawner.close()
        self._trees.cleanup()
        while self._waiting:
            self._wake_next()

    def _take_sandbox(self, plan: MountPlan) -> LocalSandbox:
        """Returns a started sandbox, perhaps not ready yet, and starts its replacement."""
        if not self._spawner.is_alive():
            self._replace_spawner()
        self.check_plan(plan)
        if plan.to_json() != EMPTY_PLAN or not self._warm:
            sandbox = self._start_sandbox(plan)
        else:
            sandbox = self._warm.popleft()
        self._used.add(sandbox)
        try:
            self._fill_warm()
        except BaseException:
            sandbox.end("no others could be started")
            raise
        return sandbox

    def _fill_warm(self) -> None:
        target = min(WARM, self.size - len(self._used))
        while len(self._warm) < target:
            self._warm.append(self._start_sandbox(MountPlan(Tree(self))))
        while len(self._warm) > target:
            self._warm.pop().end("it was not needed")

    def _start_sandbox(self, plan: MountPlan) -> LocalSandbox:
        name = str(next(self._numbers))
        try:
            channel = self._spawner.spawn(name, plan.to_json())
        except OSError:
            if self._spawner.is_alive(END_S):  # this machine has no descriptors left, or the like
                raise
            self._replace_spawner()
            self.check_plan(plan)
            channel = self._spawner.spawn(name, plan.to_json())
        return LocalSandbox(name, channel, plan)

    def check_plan(self, plan: MountPlan) -> None:
        """Raises UserError or SandboxDied for a plan that cannot be mounted."""
        if any(tree.pool is not self for tree in plan.trees):
            raise UserError("this tree is of another sandbox pool; use a tree of the pool that makes the sandbox.")
        if not plan.tree.is_alive_in(self._spawner):
            raise SandboxDied("the snapshots of this tree were lost with the process that held them")
        for name, tree in (("packages", plan.packages), ("tests", plan.tests), ("solution", plan.solution)):
            if tree is not None and (tree.base is None or tree.layers):
                raise UserError(
                    f"the tree of {name} is mounted from a folder; make it with LocalSandboxPool.tree(folder)."
                )
            if tree is not None and name != "packages" and not self.capabilities.can_mount_tests:
                raise UserError(f"the sandbox backend {self.backend!r} cannot mount {name} at /{name}; use bubblewrap.")
        if plan.network and not self.capabilities.can_use_network:
            raise UserError("this sandbox pool has no network; make it with network=True.")

    def freeze(self, sandbox: LocalSandbox) -> Tree:
        """Ends the worker of a sandbox and returns its workspace as a tree. LocalSandbox.snapshot calls this."""
        if len(sandbox.plan.tree.layers) >= MAX_DEPTH:
            raise UserError(
                f"the workspace has {MAX_DEPTH} snapshots on top of each other, which is the most; make a new tree of "
                "its files."
            )
        spawner, layer = self._spawner, sandbox.name
        spawner.freeze_layer(layer)
        tree = Tree(self, sandbox.plan.tree, layer=(spawner, layer))
        weakref.finalize(tree, spawner.drop_layer, layer)
        return tree

    def restart_worker(self, sandbox: LocalSandbox) -> tuple[str, socket.socket]:
        """Starts a new worker for a sandbox; returns its name and socket. LocalSandbox.restore calls this."""
        name = str(next(self._numbers))
        channel = self._spawner.spawn(name, sandbox.plan.to_json())
        self._spawner.kill(sandbox.name)
        return name, channel

    def _replace_spawner(self) -> None:
        self._drop_warm()
        self._spawner.close()
        self._spawner = Spawner(self._spawner.backend, self.limits, self._trees.name, self._overlays)

    def _drop_warm(self) -> None:
        while self._warm:
            self._warm.pop().end("it was not needed")

    def on_sandbox_end(self, sandbox: LocalSandbox) -> None:
        """Gives the place of an ended sandbox to the next caller. LocalSandbox.end calls this."""
        self._spawner.kill(sandbox.name)
        if sandbox in self._used:
            self._used.remove(sandbox)
            self._wake_next()

    async def _wait(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._wake_next()  # this caller had got the place: pass it on
            raise

    def _wake_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done() and not turn.get_loop().is_closed():
                turn.set_result(None)
                return
