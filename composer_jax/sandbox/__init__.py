"""Isolated workspaces and the worker inside them.

pool = SandboxPool(SandboxLimits(memory_mb=256), size=64)      # raises UserError on a machine that cannot isolate
sandbox = await pool.acquire({"add.py": "print(1 + 1)"})
result = await sandbox.run(["python", "add.py"])         # RunResult(outcome="ok", exit_code=0, stdout="2\\n", ...)
await sandbox.close()

tree = pool.tree(Path("some/repository"))                # copied once; every sandbox sees it below its own changes
sandbox = await pool.acquire({}, tree)
before = await sandbox.snapshot()                        # of any size in the same few milliseconds, and so are
other = await sandbox.fork()                             # another sandbox that holds the same, and
await sandbox.restore(before)
await pool.close()
"""

from composer_jax.sandbox.backend import WORKSPACES
from composer_jax.sandbox.change import GONE, Change
from composer_jax.sandbox.limits import SandboxLimits
from composer_jax.sandbox.pool import SandboxPool
from composer_jax.sandbox.sandbox import Outcome, RunResult, Sandbox, SandboxDied, SandboxFileError
from composer_jax.sandbox.tree import Tree

__all__ = [
    "WORKSPACES",
    "GONE",
    "Change",
    "SandboxLimits",
    "Outcome",
    "RunResult",
    "Sandbox",
    "SandboxDied",
    "SandboxFileError",
    "SandboxPool",
    "Tree",
]
