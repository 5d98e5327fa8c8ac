"""Reads task directories of Harbor and Terminal-Bench 2 (schema 1.0 to 1.4 and older) that other projects wrote.

    task.toml  instruction.md  environment/{Dockerfile, ...}  tests/{test.sh, ...}  solution/solve.sh

A task needs no image if dockerfile.py can build its workspace without one. Features that are not supported, with or
without an image, are refused in one error that lists them.
"""

import hashlib
import os
import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError
from composer_jax.sandbox import WORKSPACE_PATHS
from composer_jax.tasks.formats.checkout import move_into_store, new_folder
from composer_jax.tasks.formats.dockerfile import NeedsContainer, build_workspace, check_script
from composer_jax.tasks.formats.fields import Fields, short_repr
from composer_jax.tasks.formats.options import ReadOptions
from composer_jax.tasks.grader import ScriptGrader
from composer_jax.tasks.task import Task

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_TIMEOUT_S = 600.0  # of solve.sh and of test.sh; Harbor's value
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
_UNITS_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def is_harbor_dir(path: Path) -> bool:
    """Whether a folder is a task directory."""
    return (path / "task.toml").is_file()


def is_composer_task(directory: Path) -> bool:
    """Whether write_task wrote a directory, with its additional metadata."""
    return "composer" in _manifest(directory).table("metadata").values


def read_harbor_dir(directory: Path, options: ReadOptions) -> Task:
    """Reads the task in a directory. Raises UserError if it is incomplete or uses unsupported features."""
    top = _manifest(directory)
    environment, verifier, agent = top.table("environment"), top.table("verifier"), top.table("agent")
    if unsupported := list(_unsupported(directory, top)):
        raise UserError(
            f"the task in {directory} asks for {', '.join(unsupported)}, which is not run here; run it with Harbor"
        )
    instruction = _text(directory / "instruction.md")
    _text(directory / "tests" / "test.sh")
    if not (directory / "environment" / "Dockerfile").is_file() and "docker_image" not in environment:
        raise UserError(f"{directory} has neither an environment/Dockerfile nor a docker_image; add one")
    tests = directory / "tests"
    metadata: dict[str, Any] = {
        "described": _to_json_value(top.values.get("metadata", {})),
        "resources": _resources(environment),
    }
    if (directory / "solution" / "solve.sh").is_file():
        metadata["solution"] = str((directory / "solution").resolve())
        metadata["solution_timeout_s"] = agent.number("timeout_sec", _TIMEOUT_S)
        metadata["solution_environment"] = _env(top.table("solution"))  # expanded where the solution runs
    if variables := expand_variables(_env(environment), environment.where):
        metadata["environment"] = variables
    if workdir := _workdir(environment):
        metadata["workdir"] = workdir
    repository, image = None, None
    try:
        check_script(tests / "test.sh")
        if variables:
            raise NeedsContainer(f"{directory}/task.toml sets {', '.join(variables)} in its [environment.env]")
        if workdir not in ("", *WORKSPACE_PATHS):
            raise NeedsContainer(f"{directory}/task.toml sets [environment] workdir = {workdir!r}")
        repository = _workspace(directory, environment, options)
    except NeedsContainer as why:
        metadata["needs_image"] = str(why)
        image = environment.text("docker_image", "") or _image_name(directory)
        if "docker_image" not in environment:
            metadata["build"] = str((directory / "environment").resolve())
    return Task(
        id=top.table("task").text("name", directory.resolve().name),
        family="harbor",
        split=options.split or "heldout",
        instruction=instruction,
        files={},
        tools=options.tools,
        grader=ScriptGrader(
            tests.resolve(),
            verifier.number("timeout_sec", _TIMEOUT_S),
            expand_variables(_env(verifier), verifier.where),
        ),
        metadata=metadata,
        repository=repository,
        packages=options.packages if image is None else None,
        network=_network(environment, agent),
        image=image,
    )


def _manifest(directory: Path) -> Fields:
    path = directory / "task.toml"
    try:
        values = tomllib.loads(_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    top = Fields(values, str(path))
    if "schema_version" in top or "version" not in top:
        if (schema := top.text("schema_version", "1.0")) not in SCHEMAS:
            raise UserError(f"{path} is of schema {schema!r}; supported are {', '.join(SCHEMAS)}")
    return top


# What a table may hold: fields that are read here, and those that change nothing (limits that sandboxes do not set).
_READ = {
    "environment": {
        *("docker_image", "cpus", "memory_mb", "memory", "env", "network_mode", "allow_internet", "workdir", "gpus"),
        *("storage_mb", "storage", "build_timeout_sec", "gpu_types"),
    },
    "verifier": {"timeout_sec", "env", "user", "environment_mode", "network_mode"},
    "agent": {"timeout_sec", "user", "network_mode"},
}
_NOT_BUILT = {
    "mcp_servers": "MCP servers",
    "skills_dir": "skills",
    "healthcheck": "a health check",
    "tpu": "a TPU",
    "os": "another operating system",
    "allowed_hosts": "a network restricted to some hosts",
    "environment": "a verifier in an environment of its own",
    "collect": "commands that collect what is verified",
}


def _unsupported(directory: Path, top: Fields) -> Iterator[str]:
    """Yields what a task asks for and is not built, with the field and its value."""
    tables = {name: top.table(name) for name in ("environment", "verifier", "agent")}
    environment, verifier, agent = tables.values()
    if top.tables("steps"):
        yield "several steps ([[steps]])"
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (directory / "environment" / name).exists():
            yield f"several containers (environment/{name})"
    for name, known in _READ.items():
        for field, value in tables[name].values.items():
            asks_for_nothing = value in (None, "", False, [], {}) or (field, value) == ("os", "linux")  # 0 is False
            if field not in known and not asks_for_nothing:
                yield f"{_NOT_BUILT.get(field, 'something unknown')} ([{name}] {field} = {short_repr(value)})"
    if verifier.text("environment_mode", "shared") != "shared":
        yield f"{_NOT_BUILT['environment']} ([verifier] environment_mode = {verifier.text('environment_mode')!r})"
    if environment.number("gpus", 0):
        yield f"GPUs ([environment] gpus = {environment.values['gpus']})"
    for name, table in (("agent", agent), ("verifier", verifier)):
        if table.values.get("user") not in (None, "", "root", 0):
            yield f"another user ([{name}] user = {table.values['user']!r})"
    modes = {name: table.text("network_mode", "") for name, table in tables.items()}
    for name, mode in modes.items():
        if mode == "allowlist":
            yield f"{_NOT_BUILT['allowed_hosts']} ([{name}] network_mode = 'allowlist')"
    if modes["verifier"] and "allowlist" not in modes.values():
        of_agent = "public" if _network(environment, agent) else "no-network"
        if modes["verifier"] != of_agent:
            yield f"a network of the verifier's own ([verifier] network_mode = {modes['verifier']!r}, not {of_agent!r})"


def _network(environment: Fields, agent: Fields) -> bool:
    """Whether commands may reach the network. The agent's setting overrides the environment's."""
    default = "public" if environment.flag("allow_internet", True) else "no-network"
    mode = agent.text("network_mode", environment.text("network_mode", default))
    if mode not in ("public", "no-network"):
        raise UserError(f"{agent.where} has network_mode = {mode!r}; it is one of public, no-network, allowlist")
    return mode == "public"


def _resources(environment: Fields) -> dict[str, float]:
    """Returns cpus and memory_mb; an older text such as memory = "2G" counts if memory_mb is missing."""
    default = 2048.0
    if "memory" in environment and "memory_mb" not in environment:
        text = environment.text("memory")
        if not (match := _MEMORY.fullmatch(text.strip())):
            raise UserError(f"{environment.where} has memory = {text!r}; write memory_mb = and a number")
        default = float(match[1]) * _UNITS_MB[match[2].upper()]
    return {"cpus": environment.number("cpus", 1), "memory_mb": environment.number("memory_mb", default)}


def _workdir(environment: Fields) -> str:
    """Returns the folder of the image that is the workspace, or an empty text. Raises UserError for / and no path."""
    workdir = environment.text("workdir", "")
    if workdir and (not workdir.startswith("/") or not posixpath.normpath(workdir).strip("/")):
        raise UserError(f"{environment.where} has workdir = {short_repr(workdir)}; it must be an absolute path below /")
    return workdir


def _env(table: Fields) -> dict[str, str]:
    """Returns the table's env as it is written."""
    env = table.table("env")
    return {name: env.text(name) for name in env.values}


def expand_variables(env: Mapping[str, str], where: str) -> dict[str, str]:
    """Returns an env with ${NAME} and ${NAME:-default} expanded from the environment of this process.

    where: the table of the env, for the UserError about a variable that is missing here.
    """

    def value(match: re.Match[str]) -> str:
        if (text := os.environ.get(match[1], match[2])) is None:
            raise UserError(f"{where} [env] needs the environment variable {match[1]}; set it")
        return text

    return {name: _VARIABLE.sub(value, text) for name, text in env.items()}


def _workspace(directory: Path, environment: Fields, options: ReadOptions) -> Path:
    """Returns a folder with the Dockerfile's workspace. Raises NeedsContainer if that needs an image."""
    dockerfile = directory / "environment" / "Dockerfile"
    if not dockerfile.is_file():
        raise NeedsContainer(f"{directory}/task.toml names the image {environment.text('docker_image')}")
    with new_folder(options.store) as files:
        build_workspace(dockerfile, files, options.packages)
        return move_into_store(files, options.store / f"harbor@{_digest(files)}")


def _image_name(directory: Path) -> str:
    """Returns the name of the image built from this directory; it contains a hash of the build files."""
    slug = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-") or "task"
    return f"composer-jax/{slug}:{_digest(directory / 'environment')}"


def _digest(folder: Path) -> str:
    hasher = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            kind, data = "link", os.fsencode(os.readlink(path))
        elif path.is_file():
            kind, data = f"file{path.stat().st_mode & 0o111:o}", path.read_bytes()
        else:
            kind, data = "folder", b""
        for part in (path.relative_to(folder).as_posix().encode(errors="surrogateescape"), kind.encode(), data):
            hasher.update(len(part).to_bytes(8, "big") + part)
    return hasher.hexdigest()[:16]


def _text(path: Path) -> str:
    if path.is_symlink():  # the agent reads its contents, and a link may lead to any file
        raise UserError(f"{path} is a link; put the file itself there")
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; a Harbor task needs it") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error


def _to_json_value(value: Any) -> Any:
    """Converts TOML values to JSON values: dates become texts."""
    if isinstance(value, Mapping):
        return {key: _to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_json_value(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool) else str(value)
