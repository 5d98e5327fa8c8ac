"""A real engine and an image made here, of busybox and bash. Where none works, its tests are skipped and say why."""

import asyncio
import io
import os
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import SandboxDied, SandboxLimits
from composer_jax.sandbox.container_pool import ContainerPool
from composer_jax.sandbox.engine import ContainerEngine, find_engine, last_line

IMAGE = f"localhost/composer-jax-test-{os.getpid()}:latest"  # one for each worker of the tests: it removes its own
PROGRAMS = "sh cat tar sleep stat timeout mkdir find rm echo id env touch ln xargs wc chmod setsid dd true tr ls"
OLD_FILES = ("kept", "doomed", "old/one", "old/two")


@dataclass(frozen=True)
class EngineWithImage(ContainerEngine):
    image: str = IMAGE


def libraries(program):
    return re.findall(r"(/\S+) \(0x", subprocess.run(["ldd", program], capture_output=True, text=True).stdout)


def image_archive(busybox, bash):
    """The root of an image: the two programs, what they are linked with, and a workspace with a few files."""
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w", dereference=True) as tar:
        for folder in ("bin", "tmp", "etc", "workspace", "workspace/old", "workspace/.git"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for file in {busybox, *libraries(busybox), bash, *libraries(bash)}:
            tar.add(file, {busybox: "bin/busybox", bash: "bin/bash"}.get(file, file))
        for name in PROGRAMS.split():
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        for path in (*OLD_FILES, ".git/later-commits"):
            entry = tarfile.TarInfo(f"workspace/{path}")
            entry.size = 4
            tar.addfile(entry, io.BytesIO(b"old\n"))
    return packed.getvalue()


def working_engine():
    """An engine that has run something, or why there is none. One that answers may still start nothing."""
    busybox, bash = shutil.which("busybox"), shutil.which("bash")
    if not (busybox and bash):
        return None, "there is no busybox, or no bash, to make an image of"
    try:
        engine = find_engine()
    except UserError as error:
        return None, str(error)
    archive = image_archive(busybox, bash)
    made = subprocess.run([engine.command, "import", "-", IMAGE], input=archive, capture_output=True)
    if made.returncode:
        return None, f"{engine.command} takes no image: {last_line(made.stderr.decode())}"

    async def start():
        async with ContainerPool(IMAGE, SandboxLimits(memory_mb=64), engine=engine) as pool:
            await pool.acquire({})

    try:
        asyncio.run(start())
    except SandboxDied as error:
        return None, str(error)
    return EngineWithImage(engine.command), None


@pytest.fixture(scope="session")
def engine():
    engine, reason = working_engine()
    if engine is None:
        pytest.skip(reason)
    yield engine
    engine.call("rmi", "--force", IMAGE)
