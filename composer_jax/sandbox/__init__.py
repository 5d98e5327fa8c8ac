"""Isolated workspaces and the worker inside them.

pool = LocalSandboxPool(SandboxLimits(memory_mb=256), size=64)   # raises UserError on a machine that cannot isolate
sandbox = await pool.acquire({"add.py": "print(1 + 1)"})
result = await sandbox.run(["python", "add.py"])         # RunResult(outcome="ok", exit_code=0, stdout="2\\n", ...)
await sandbox.close()

tree = pool.tree(Path("some/repository"))                # copied once; every sandbox sees it below its own changes
sandbox = await pool.acquire({}, tree)
before = await sandbox.snapshot()                        # takes milliseconds whatever the workspace holds
other = await sandbox.fork()                             # another sandbox with the same workspace
await sandbox.restore(before)
await pool.close()

Code that takes a pool is typed against Sandbox and SandboxPool (protocol.py).
"""

from composer_jax.sandbox.backend import WORKSPACE_PATHS
from composer_jax.sandbox.change import GONE, Change
from composer_jax.sandbox.errors import SandboxDied, SandboxFileError, SandboxKilled
from composer_jax.sandbox.limits import SandboxLimits
from composer_jax.sandbox.local_pool import LocalSandboxPool
from composer_jax.sandbox.local_sandbox import LocalSandbox
from composer_jax.sandbox.protocol import Capabilities, Sandbox, SandboxPool
from composer_jax.sandbox.run_result import Outcome, RunResult
from composer_jax.sandbox.tree import Tree

__all__ = [
    "GONE",
    "WORKSPACE_PATHS",
    "Capabilities",
    "Change",
    "LocalSandbox",
    "LocalSandboxPool",
    "Outcome",
    "RunResult",
    "Sandbox",
    "SandboxDied",
    "SandboxFileError",
    "SandboxKilled",
    "SandboxLimits",
    "SandboxPool",
    "Tree",
]
