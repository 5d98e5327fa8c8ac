"""Isolated workspaces and the worker inside them.

pool = SandboxPool(Limits(memory_mb=256), size=64)      # raises UserError on a machine that cannot isolate
sandbox = await pool.acquire({"add.py": "print(1 + 1)"})
result = await sandbox.run(["python", "add.py"])         # RunResult(outcome="ok", exit_code=0, stdout="2\\n", ...)
await sandbox.close()
await pool.close()
"""

from composer_jax.sandbox.limits import Limits
from composer_jax.sandbox.pool import SandboxPool
from composer_jax.sandbox.sandbox import Outcome, RunResult, Sandbox, SandboxDied, SandboxFileError

__all__ = ["Limits", "Outcome", "RunResult", "Sandbox", "SandboxDied", "SandboxFileError", "SandboxPool"]
