"""The flag --config: the file or packaged config that it names, and the fields that the command line sets."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from ml_collections import ConfigDict, FieldReference, config_dict, config_flags

from composer_jax.errors import UserError
from composer_jax.schema.renamed import outdated_field

PACKAGED = Path(__file__).resolve().parents[1] / "configs"
"""The configs that are installed with the entry points: a folder beside launch/, in a checkout and in site-packages."""
WORKDIR_CONFIG = Path(__file__).with_name("workdir_config.py")
"""The config file that reads the config of a run folder."""

_CONFIG = re.compile(r"--?config(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"-{1,2}(?:no)?config\.([^=]+)")


def packaged_names() -> list[str]:
    """Returns the names of the packaged configs: 'tiny' for configs/tiny.py."""
    return sorted(file.stem for file in PACKAGED.glob("*.py") if file.stem != "__init__")


def with_config_path(argv: Sequence[str]) -> list[str]:
    """Returns `argv` with the name of a packaged config ('tiny:smoke') replaced by its path.

    Without --config, the config is the one that the folder of --workdir holds, if a run has begun there, and otherwise
    the packaged `base`, if --config.base names one, for contexts that this base allows.

    Raises:
      UserError: there is no packaged config of that name, or no base at that address.
    """
    argv = list(argv)
    if not any(_CONFIG.fullmatch(arg) for arg in argv) and (workdir := _begun_workdir(argv)):
        return [*argv[:1], f"--config={WORKDIR_CONFIG}:{workdir}", *argv[1:]]
    if not any(_CONFIG.fullmatch(arg) for arg in argv) and (base := _base(argv)):
        return [*argv[:1], f"--config={PACKAGED / 'base.py'}{_context_of(base)}", *argv[1:]]
    for i, arg in enumerate(argv):
        if arg == "--":
            break
        match = _CONFIG.fullmatch(arg)
        if match and match.group(1) is not None:
            argv[i] = f"--config={_config_path(match.group(1))}"
        elif match and i + 1 < len(argv):
            argv[i + 1] = _config_path(argv[i + 1])
    return argv


def _base(argv: Sequence[str]) -> str | None:
    """Returns the value of --config.base."""
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_string("config.base", None, "The base.", flag_values=values)
    values.set_gnu_getopt()
    values(list(argv), known_only=True)
    return values["config.base"].value


def _context_of(base: str) -> str:
    """Returns ":8192", the argument of configs/base.py for a base with a shorter context than that config has."""
    from composer_jax.checkpoint.base_model import open_base
    from configs.base import CONTEXT

    longest = open_base(base).config.max_context
    return f":{longest}" if longest < CONTEXT else ""


def _begun_workdir(argv: Sequence[str]) -> str | None:
    """Returns the value of --workdir if that folder, of this machine or in a bucket, holds a config."""
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_string("workdir", None, "The run folder.", flag_values=values)
    values.set_gnu_getopt()
    values(list(argv), known_only=True)
    workdir = values["workdir"].value
    if not workdir:
        return None
    from composer_jax.storage.workdir import read_run_config

    return workdir if read_run_config(workdir) is not None else None


def _config_path(value: str) -> str:
    """Returns the path of what --config names, with the argument of get_config() that follows the colon, if any."""
    name, colon, argument = value.partition(":")
    if os.sep in name or name.endswith(".py"):
        return value
    if name not in packaged_names():
        raise UserError(
            f"--config={value}: there is no packaged config {name!r}; packaged are {', '.join(packaged_names())}; "
            "a file of yours is named by its path, such as ./mine.py"
        )
    return f"{PACKAGED / name}.py{colon}{argument}"


def define_config(values: absl_flags.FlagValues, argv: Sequence[str]) -> None:
    """Defines --config and a flag for each field that `argv` sets."""
    config_flags.DEFINE_config_file(
        "config",
        None,
        "The run's config: the name of a packaged one, or a Python file with get_config(); NAME:ARGUMENT passes it an "
        f"argument. Packaged: {', '.join(packaged_names())}.",
        lock_config=True,
        flag_values=values,
        sys_argv=list(argv),
    )


def load_config(argv: Sequence[str]) -> ConfigDict | None:
    """Returns the config that `argv` names, without its overrides; None if it names none.

    Raises:
      UserError: there is no such file, or its get_config() returns no ConfigDict.
    """
    values = absl_flags.FlagValues()
    define_config(values, argv[:1])
    values.set_gnu_getopt()  # the value of another flag may stand alone before --config
    try:
        values(list(argv), known_only=True)
    except absl_flags.Error as error:
        raise UserError(str(error)) from error
    config = values["config"].value
    if config is None:
        return None
    flag: Any = values["config"]  # a config file flag, which knows its file
    file = Path(flag.config_filename.split(":", 1)[0])
    if not file.is_file():
        beside = [str(other) for other in sorted(file.parent.glob("*.py")) if other.name != "__init__.py"]
        hint = f"; there are {', '.join(beside[:6])}" if beside else "; the path is relative to the current folder"
        raise UserError(f"the config file {file} does not exist{hint}")
    config = values.config
    if not isinstance(config, ConfigDict):
        raise UserError(f"get_config() of {file} returns {type(config).__name__}, not a ConfigDict")
    return config


def parse_with_config(values: absl_flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Parses `argv` into `values`, of which --config is one; returns the words that are not flags.

    The config is locked afterwards.

    Raises:
      UserError: --config is missing, or a flag or field is unknown or has a value of the wrong type.
    """
    config = load_config(argv)
    if config is None:
        raise UserError(
            "--config is missing: the run's config, e.g. --config=tiny or --config=path/to/mine.py; a --workdir in "
            "which a run has begun and a command with --config.base=hf:DIR need none"
        )
    for path in _overrides(argv):
        _check_field(path, config)
    define_config(values, argv)
    try:
        rest = values(list(argv))
    except (absl_flags.Error, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(_with_field_type(str(error), config)) from error
    return rest[1:]


def fields(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields ('rl.steps', 60) for every field of the config; a group of fields is not one itself."""
    for name, value in config.items(preserve_field_references=True):
        if isinstance(value, ConfigDict):
            yield from fields(value, f"{prefix}{name}.")
        elif isinstance(value, FieldReference):
            try:
                yield prefix + name, value.get()
            except config_dict.RequiredValueError:
                yield prefix + name, None
        else:
            yield prefix + name, value


def _overrides(argv: Sequence[str]) -> Iterator[str]:
    """The fields that the command line sets: 'rl.steps' for --config.rl.steps=3."""
    for arg in argv[1:]:
        match = _OVERRIDE.match(arg)
        if match:
            yield match.group(1)


def _check_field(path: str, config: ConfigDict) -> None:
    """Raises a UserError with the nearest names if the config has no field at `path`."""
    values = dict(fields(config))
    # The elements of a list can be set one by one: sizes[0].
    if path in values or isinstance(values.get(path.split("[")[0]), list):
        return
    inside = [field for field in values if field.startswith(f"{path}.")]
    if inside:
        raise UserError(f"--config.{path} is a group of fields; set one of {_enumerate(inside)}")

    if change := outdated_field(path):
        raise UserError(f"--config.{path}: {change}")

    def likeness(field: str) -> float:
        whole = difflib.SequenceMatcher(None, path, field).ratio()
        last = difflib.SequenceMatcher(None, path.split(".")[-1], field.split(".")[-1]).ratio()
        return max(whole, last)

    near = [field for field in sorted(values, key=likeness, reverse=True)[:3] if likeness(field) > 0.6]
    hint = f"did you mean {_enumerate(near)}?" if near else f"it has {_enumerate(list(config))}"
    raise UserError(f"--config.{path}: the config has no field {path!r}; {hint}")


def _with_field_type(message: str, config: ConfigDict) -> str:
    """absl's message; if it is about a field, followed by the type and value of the field."""
    for path, value in fields(config):
        if re.search(rf"config\.{re.escape(path)}(=|:| |$)", message):
            return f"{message}; {path} is of type {type(value).__name__}, in the config {value!r}"
    return message


def _enumerate(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
