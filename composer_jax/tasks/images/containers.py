"""The containers of a task that cannot run without its image."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from composer_jax.errors import UserError
from composer_jax.sandbox import SandboxLimits
from composer_jax.sandbox.container_pool import ContainerPool
from composer_jax.sandbox.engine import Engine, find_engine
from composer_jax.tasks.grader import ScriptGrader
from composer_jax.tasks.task import Task

CONTAINER_LIMITS = SandboxLimits(
    timeout_s=60.0, memory_mb=4096, processes=1024, open_files=4096, workspace_mb=512, output_kb=64
)
"""Of a container, but for what the task says. Ours: what builds and tests of the published tasks need."""

INSTALL_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""Capabilities that package managers need. Scripts that grade install what they need with them; the tests of data sets
do not, so their containers have none. KILL is what ends processes of a user that root has become."""


def container_pool(
    task: Task, size: int = 8, engine: Engine | None = None, turns: asyncio.Semaphore | None = None
) -> ContainerPool:
    """A pool of containers for one task, with the memory, CPUs and variables that it asks for.

    Builds the image where the task has a Dockerfile and it was not built yet. Raises UserError for a task without an
    image, where no engine works, and where an image that is not built here was not pulled.
    """
    if task.image is None:
        raise UserError(f"task {task.id} needs no image; run it in a LocalSandboxPool")
    engine = engine or find_engine()
    if "build" in task.metadata and engine.call("image", "inspect", task.image).returncode:
        engine.build(task.metadata["build"], task.image)
    resources = task.metadata.get("resources", {})
    memory_mb = max(64, int(resources.get("memory_mb", CONTAINER_LIMITS.memory_mb)))
    return ContainerPool(
        task.image,
        SandboxLimits(**{**vars(CONTAINER_LIMITS), "memory_mb": memory_mb}),
        size,
        engine=engine,
        cpus=resources.get("cpus", 1.0) or 1.0,
        linux_capabilities=INSTALL_CAPABILITIES if isinstance(task.grader, ScriptGrader) else (),
        environment=task.metadata.get("environment"),
        turns=turns,
        hide_history=not isinstance(task.grader, ScriptGrader),  # to whom a .git may be what the task is about
    )


def require_images(tasks: Iterable[Task]) -> None:
    """Raises UserError where no engine works, and for a task whose image is neither here nor built here."""
    tasks = list(tasks)
    if not tasks:
        return
    engine = find_engine()
    for image in sorted({task.image for task in tasks if "build" not in task.metadata}):
        engine.working_folder(image)
