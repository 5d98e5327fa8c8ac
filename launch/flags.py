"""What every entry point shares: its flags, and how it ends when something is wrong.

An entry point is

    \"\"\"What it does, in a paragraph: this is what --help shows.\"\"\"
    from launch import flags

    def main(config, workdir): ...

    if __name__ == "__main__":
        flags.run(main)

or, where no config describes what is wanted, one with flags of its own:

    def define(values):
        absl_flags.DEFINE_string("checkpoint", None, "What it is.", flag_values=values)
        return ("checkpoint",)  # the flags that must be given; "config" among them is that of the other form
    def main(values): ...

    if __name__ == "__main__":
        flags.run(main, define=define)

With `arguments="COMMAND..."` words that are no flags are given to main(values, words).

Several hosts run an entry point together (launch/hosts.py): on a TPU pod, under SLURM and wherever else the machine
says what it started, without a flag; elsewhere with --coordinator, --processes and --process.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from absl import flags as absl_flags
from ml_collections import ConfigDict, FieldReference, config_dict, config_flags

from composer_jax.errors import UserError
from launch import hosts
from launch.huge_pages import restart_with_huge_pages

Main = (
    Callable[[ConfigDict, Path], None]
    | Callable[[absl_flags.FlagValues], None]
    | Callable[[absl_flags.FlagValues, list[str]], None]
)
Define = Callable[[absl_flags.FlagValues], Sequence[str]]

BAD_INPUT = 2  # exit codes; an error nobody foresaw keeps its traceback and Python's exit code 1
NO_SPACE = 3
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

_OVERRIDE = re.compile(r"-{1,2}(?:no)?config\.([^=]+)")


def run(
    main: Main,
    argv: Sequence[str] | None = None,
    *,
    define: Define | None = None,
    arguments: str = "",
    processes: str = hosts.SEVERAL,
) -> NoReturn:
    """Parses the command line, calls `main(config, workdir)` and ends the process with an exit code.

    argv: as sys.argv, which is the default; the first element is the program.
    define: declares flags of the entry point's own in place of --config and --workdir, and returns the names of those
      that must be given; then it is `main(values)`. If "config" is among the names, there is --config beside them.
    arguments: what --help calls the words that are no flags; "" refuses them. They may follow `--`. Needs `define`.
    processes: what it does as one of several: hosts.SEVERAL, ALONE or WITHOUT_DEVICES.

    The config is locked: unknown fields cannot be set. Bad input (a UserError anywhere below), a full disk
    and Ctrl-C (or SIGTERM) each end with one sentence on stderr; any other exception propagates. What ends one of
    several processes ends all of them.
    """
    if argv is None:
        restart_with_huge_pages()
    argv = list(sys.argv if argv is None else argv)
    command = f"python -m {_program(argv)} {shlex.join(argv[1:])}"
    if define is not None and processes != hosts.WITHOUT_DEVICES:
        define = _with_hosts(define)
    finish = None
    try:
        if any(arg in ("-h", "--help", "-help") for arg in itertools.takewhile(lambda arg: arg != "--", argv[1:])):
            print(_help(argv) if define is None else _own_help(argv, define, arguments))
            sys.exit(0)
        values, words = (_parse(argv), []) if define is None else parse_own(argv, define, bool(arguments))
        if "coordinator" in values:
            finish = hosts.join(values, _program(argv), processes)
        signal.signal(signal.SIGTERM, _as_ctrl_c)  # after joining, for which JAX takes SIGTERM itself
        # Some libraries read absl's global flags: they get the defaults.
        absl_flags.FLAGS(argv[:1])
        if define is None:
            main(values.config, Path(values.workdir))
        else:
            main(*((values, words) if arguments else (values,)))
        if finish is not None:
            finish()
    except BaseException as error:
        ending = _ending(error, command, kept=define is None)
        if finish is not None:
            hosts.end(error, _program(argv), ending)
        if ending is None:
            raise
        code, sentence = ending
        print(f"\n{_program(argv)}: {sentence}", file=sys.stderr, flush=True)
        sys.exit(code)
    sys.exit(0)


def parse(argv: Sequence[str]) -> tuple[ConfigDict, Path]:
    """(config with its overrides applied and locked, run folder) of a command line; argv[0] is the program.

    Raises:
      UserError: a flag or field is unknown, missing, or has a value of the wrong type; there is no such
        config file.
    """
    values = _parse(argv)
    return values.config, Path(values.workdir)


def _parse(argv: Sequence[str]) -> absl_flags.FlagValues:
    """The values of --config, --workdir and the flags of several processes."""
    values = _define(argv)
    _parse_with_config(values, argv)
    if not values.workdir:
        raise UserError("--workdir is missing: the folder this run writes to, e.g. --workdir=runs/first")
    return values


def _parse_with_config(values: absl_flags.FlagValues, argv: Sequence[str]) -> None:
    """Parses flags of which --config is one."""
    base = _base_config(argv)
    for path in _overrides(argv):
        _check_field(path, base)
    try:
        rest = values(list(argv))
    except (absl_flags.Error, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(_value_complaint(str(error), base)) from error
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}; a field is set by --config.FIELD=VALUE")


def parse_own(
    argv: Sequence[str], define: Define, with_arguments: bool = False
) -> tuple[absl_flags.FlagValues, list[str]]:
    """The values of an entry point's own flags, and the words that are none, if there may be any.

    Raises:
      UserError: a flag is unknown, missing or has a wrong value.
    """
    values = absl_flags.FlagValues()
    required, words = define(values), []
    if "config" in required:
        _define_config(values, argv)
        _parse_with_config(values, argv)
    else:
        try:
            words = values(list(argv))[1:]
        except absl_flags.Error as error:
            raise UserError(str(error)) from error
        if words and not with_arguments:
            raise UserError(f"unexpected argument {words[0]!r}; --help lists the flags")
    for name in required:
        if values[name].value is None:
            raise UserError(f"--{name} is missing: {values[name].help}")
    return values, words


def _with_hosts(define: Define) -> Define:
    """The flags of `define` and those that say which of several processes this is."""

    def both(values: absl_flags.FlagValues) -> Sequence[str]:
        required = define(values)
        hosts.define(values)
        return required

    return both


def _define(argv: Sequence[str]) -> absl_flags.FlagValues:
    """Our flags in a set of their own, so that --help and typos know nothing of the flags libraries define.

    argv: where the overrides of the config's fields are looked up.
    """
    values = absl_flags.FlagValues()
    _define_config(values, argv)
    absl_flags.DEFINE_string(
        "workdir",
        None,
        "The folder the run writes to. The same command continues a run that was stopped.",
        flag_values=values,
    )
    hosts.define(values)
    return values


def _define_config(values: absl_flags.FlagValues, argv: Sequence[str]) -> None:
    config_flags.DEFINE_config_file(
        "config",
        None,
        "The run's settings: a Python file with get_config(), or FILE:ARGUMENT to pass it an argument.",
        lock_config=True,
        flag_values=values,
        sys_argv=list(argv),
    )


def _base_config(argv: Sequence[str]) -> ConfigDict:
    """The config before overrides."""
    values = _define(argv[:1])
    try:
        values(list(argv), known_only=True)
    except absl_flags.Error as error:
        raise UserError(str(error)) from error
    if values["config"].value is None:
        raise UserError("--config is missing: the file with the run's settings, e.g. --config=configs/tiny.py")
    name = values["config"].config_filename
    file = Path(name.split(":", 1)[0])
    if not file.is_file():
        beside = [str(other) for other in sorted(file.parent.glob("*.py")) if other.name != "__init__.py"]
        near = f"; there are {', '.join(beside[:6])}" if beside else "; the path is relative to the current folder"
        raise UserError(f"the config file {file} does not exist{near}")
    if not isinstance(values.config, ConfigDict):
        raise UserError(f"get_config() of {file} returns {type(values.config).__name__}, not a ConfigDict")
    return values.config


def _overrides(argv: Sequence[str]) -> Iterator[str]:
    """The fields that the command line sets: 'rl.steps' for --config.rl.steps=3."""
    for arg in argv[1:]:
        match = _OVERRIDE.match(arg)
        if match:
            yield match.group(1)


def _fields(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """('rl.steps', 60) for every field, groups left out."""
    for name, value in config.items(preserve_field_references=True):
        if isinstance(value, ConfigDict):
            yield from _fields(value, f"{prefix}{name}.")
        elif isinstance(value, FieldReference):
            try:
                yield prefix + name, value.get()
            except config_dict.RequiredValueError:
                yield prefix + name, None
        else:
            yield prefix + name, value


def _check_field(path: str, config: ConfigDict) -> None:
    """Raises a UserError if the config has no field of that name, with the nearest names it has."""
    fields = dict(_fields(config))
    # The elements of a list can be set alone: sizes[0].
    if path in fields or isinstance(fields.get(path.split("[")[0]), list):
        return
    inside = [field for field in fields if field.startswith(f"{path}.")]
    if inside:
        raise UserError(f"--config.{path} is a group of fields; set one of {_listed(inside)}")

    def likeness(field: str) -> float:
        whole = difflib.SequenceMatcher(None, path, field).ratio()
        last = difflib.SequenceMatcher(None, path.split(".")[-1], field.split(".")[-1]).ratio()
        return max(whole, last)

    near = [field for field in sorted(fields, key=likeness, reverse=True)[:3] if likeness(field) > 0.6]
    hint = f"did you mean {_listed(near)}?" if near else f"it has {_listed(list(config))}"
    raise UserError(f"--config.{path}: the config has no field {path!r}; {hint}")


def _value_complaint(message: str, config: ConfigDict) -> str:
    """absl's words, plus the field's type and value where they are about a field."""
    for path, value in _fields(config):
        if re.search(rf"config\.{re.escape(path)}(=|:| |$)", message):
            return f"{message}; {path} is of type {type(value).__name__}, in the config {value!r}"
    return message


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _help(argv: Sequence[str]) -> str:
    """The entry point's docstring, our flags, and the fields of the config if one is given."""
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), ""]
    lines.append(f"usage: python -m {_program(argv)} --config=FILE --workdir=DIR [--config.FIELD=VALUE ...]")
    values = _define(argv[:1])
    lines += [f"  --{name}: {values[name].help}" for name in ("config", "workdir", *hosts.FLAGS)]
    if any(re.match(r"-{1,2}config(=|$)", arg) for arg in argv[1:]):
        config = _base_config([arg for arg in argv if arg not in ("-h", "--help", "-help")])
        lines += ["", "fields of this config and their values, explained where they are declared in it:"]
        lines += [f"  --config.{path}={value}" for path, value in _fields(config)]
    else:
        lines.append("  Add --config=FILE to see the fields of that config.")
    return "\n".join(lines).strip()


def _own_help(argv: Sequence[str], define: Define, arguments: str = "") -> str:
    """The entry point's docstring and its flags with their defaults."""
    values = absl_flags.FlagValues()
    if "config" in define(values):
        _define_config(values, argv[:1])
    lines = [
        (sys.modules["__main__"].__doc__ or "").strip(),
        "",
        f"usage: python -m {_program(argv)} [flags] {arguments}".rstrip(),
    ]
    for name in values:
        default = "" if values[name].default is None else f" (default: {values[name].default})"
        lines.append(f"  --{name}: {values[name].help}{default}")
    return "\n".join(lines).strip()


def _program(argv: Sequence[str]) -> str:
    """'launch.pretrain' when run by `python -m launch.pretrain`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(argv[0]).stem


def _as_ctrl_c(number, frame) -> None:
    """SIGTERM, which a scheduler sends before it kills, saves and says how to continue, as Ctrl-C does."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.raise_signal(signal.SIGINT)  # whoever waits for Ctrl-C (asyncio, a training step) hears it
    else:  # a process in the background ignores SIGINT
        raise KeyboardInterrupt


def _ending(error: BaseException, command: str, *, kept: bool) -> tuple[int, str] | None:
    """(exit code, sentence) for what a person can act on, else None.

    kept: whether the entry point has a run folder, which keeps what was done.
    """
    leaves = list(_leaves(error))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        if not kept:
            return INTERRUPTED, "stopped."
        return INTERRUPTED, f"stopped. What was saved is kept; the same command continues: {command}"
    if all(isinstance(leaf, UserError) for leaf in leaves):
        return BAD_INPUT, " ".join(str(leaves[0]).split())
    for cause in (cause for leaf in leaves for cause in _causes(leaf)):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" ({cause.filename})" if cause.filename else ""
            advice = "what was saved is kept; free some space and continue" if kept else "free some space and try again"
            return NO_SPACE, f"{cause.strerror}{where}; {advice}: {command}"
    return None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The members of exception groups, which task groups wrap around what their tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
