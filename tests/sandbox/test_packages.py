"""Forks, the shell and the children of programs import the same packages: those of the sandbox and no others."""

import asyncio
import json
import warnings

import pytest

from composer_jax.sandbox import LocalSandboxPool
from tests.sandbox.fixtures import LIMITS

IMPORTABLE = "import json, pkgutil; print(json.dumps(sorted({m.name for m in pkgutil.iter_modules()})))"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IMPORTABLE!r}], check=True)"


@pytest.fixture
def packages(tmp_path):
    (tmp_path / "packages/bin").mkdir(parents=True)
    (tmp_path / "packages/only_here.py").write_text("name = 'found'\n")
    script = tmp_path / "packages/bin/say-hello"
    script.write_text("#!/usr/bin/env python\nimport only_here\nprint(only_here.name)\n")
    script.chmod(0o755)
    return tmp_path / "packages"


def observe(pool, packages):
    """(what each way to start Python can import, the output of a program of the packages)."""

    async def go():
        installed = await pool.trees.get(packages)
        async with await pool.acquire({"names.py": IMPORTABLE}, packages=installed) as sandbox:
            results = [
                await sandbox.run(["python", "-c", IMPORTABLE]),
                await sandbox.run(["python", "-c", CHILD]),
                await sandbox.shell("python names.py"),
                await sandbox.shell("python3 < names.py"),
                await sandbox.shell('env python -c "$(cat names.py)"'),
                await sandbox.shell("PYTHONPATH=. python names.py"),
                await sandbox.shell("python -I names.py"),
            ]
            return results, [await sandbox.run(["say-hello"]), await sandbox.shell("say-hello")]

    results, hello = asyncio.run(go())
    assert [result.outcome for result in (*results, *hello)] == ["ok"] * 9, results
    return [set(json.loads(result.stdout)) - {"names"} for result in results], hello


@pytest.mark.parametrize("backend", ["auto", "landlock", "subprocess"])
def test_every_python_imports_the_same_packages(packages, backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # subprocess isolates nothing
        pool = LocalSandboxPool(LIMITS, size=1, backend=backend)
    try:
        seen, hello = observe(pool, packages)
    finally:
        pool.kill()
    assert all(names == seen[0] for names in seen)
    assert "only_here" in seen[0] and "json" in seen[0]
    assert not seen[0] & {"pip", "setuptools", "pytest", "numpy"}
    assert [result.stdout for result in hello] == ["found\n"] * 2
