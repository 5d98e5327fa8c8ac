"""Container pools for tasks that need an image."""

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
"""Default limits of a container. Our choice: enough for builds and tests of published tasks."""

INSTALL_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""Capabilities that package managers need. Only containers of tasks graded by a script get them, because such scripts
install packages. KILL lets root end processes of another user."""


def container_pool(
    task: Task, size: int = 8, engine: Engine | None = None, turns: asyncio.Semaphore | None = None
) -> ContainerPool:
    """Returns a pool of containers for one task, with the memory, CPUs and variables that the task asks for.

    Builds the image if the task has a Dockerfile and the image does not exist. Raises UserError for a task without an
    image, without a working engine, and for a missing image that is not built here.

    size: containers in use at once. turns: bounds the containers in use across several pools.
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
        hide_history=not isinstance(task.grader, ScriptGrader),  # a script's task may be about .git itself
    )


def require_images(tasks: Iterable[Task]) -> None:
    """Raises UserError without a working engine, and for an image that is neither on this machine nor built here."""
    images = [(task.image, "build" in task.metadata) for task in tasks if task.image is not None]
    if not images:
        return
    engine = find_engine()
    for image in sorted({image for image, is_built_here in images if not is_built_here}):
        engine.working_folder(image)
