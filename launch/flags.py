"""The command line of every entry point: its flags, and its exit code and message after an error.

An entry point is

    \"\"\"What it does, in a paragraph: --help prints it.\"\"\"
    from launch import flags

    def main(config, workdir): ...

    if __name__ == "__main__":
        flags.run(main)

or, with flags beside --config and --workdir, which `options` declares: main(config, workdir, values);
or, with flags of its own only:

    def define(values):
        absl_flags.DEFINE_string("checkpoint", None, "What it is.", flag_values=values)
        return ("checkpoint",)  # the flags that are required; "config" among them is that of the other form
    def main(values): ...

    if __name__ == "__main__":
        flags.run(main, define=define)

With `arguments="COMMAND..."` the words that are not flags are passed on: main(values, words).

Several hosts run an entry point together (launch/hosts.py): without a flag on a TPU pod, under SLURM and under other
launchers that set the process's rank in its environment; elsewhere with --coordinator, --processes and --process.
"""

from __future__ import annotations

import itertools
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import flags as absl_flags
from ml_collections import ConfigDict

from composer_jax.errors import UserError
from launch import hosts
from launch.config_file import parse_with_config, with_config_path
from launch.exit_codes import exit_reason
from launch.garbage import collect_rarely
from launch.help import help_text
from launch.huge_pages import restart_with_huge_pages

Main = Callable[..., None]
"""main(config: ConfigDict, workdir: Path, or str for a URL), with `options` also values: FlagValues; with `define`,
main(values); with `arguments`, main(values, words: list[str])."""
Define = Callable[[absl_flags.FlagValues], Sequence[str]]


def run(
    main: Main,
    argv: Sequence[str] | None = None,
    *,
    define: Define | None = None,
    options: Callable[[absl_flags.FlagValues], object] | None = None,
    arguments: str = "",
    processes: str = hosts.MULTI_PROCESS,
) -> NoReturn:
    """Parses the command line, calls `main(config, workdir)` and ends the process with an exit code.

    argv: as sys.argv, which is the default; the first element is the program.
    define: declares the entry point's own flags in place of --config and --workdir, and returns the names of the
      required ones; main is then called as `main(values)`. "config" among the names adds --config.
    options: declares flags beside --config and --workdir; main is then called as `main(config, workdir, values)`.
    arguments: what --help calls the words that are not flags; "" refuses them. They may follow `--`. Needs `define`.
    processes: what the entry point does as one of several: hosts.MULTI_PROCESS, SINGLE_PROCESS or NO_DEVICES.

    The config is locked: unknown fields cannot be set. Bad input (a UserError anywhere below), a full disk
    and Ctrl-C (or SIGTERM) each end with one sentence on stderr; any other exception propagates. An error in one of
    several processes ends all of them.
    """
    if argv is None:
        restart_with_huge_pages()
        collect_rarely()
    argv = list(sys.argv if argv is None else argv)
    program, finish = _program(argv), None
    command = f"python -m {program} {shlex.join(argv[1:])}"
    define_all = _with(_define_run, options) if define is None else define
    if define is not None and processes != hosts.NO_DEVICES:
        define_all = _with(define, hosts.define_flags)
    try:
        if any(arg in ("-h", "--help", "-help") for arg in itertools.takewhile(lambda arg: arg != "--", argv[1:])):
            values = absl_flags.FlagValues()
            print(help_text(program, with_config_path(argv), values, define_all(values), arguments))
            sys.exit(0)
        values, words = parse_flags(argv, define_all, bool(arguments))
        if "coordinator" in values:
            finish = hosts.join(values, program, processes)
        signal.signal(signal.SIGTERM, _raise_sigint)  # after joining, in which JAX installs a SIGTERM handler
        absl_flags.FLAGS(argv[:1])  # libraries that read absl's global flags get the defaults
        main(*_main_arguments(values, words, define, options is not None, arguments))
        if finish is not None:
            finish()
    except BaseException as error:
        reason = exit_reason(error, command, has_workdir=define is None)
        if finish is not None:
            hosts.abort(error, program, reason)
        if reason is None:
            raise
        code, sentence = reason
        print(f"\n{program}: {sentence}", file=sys.stderr, flush=True)
        sys.exit(code)
    sys.exit(0)


def parse(argv: Sequence[str]) -> tuple[ConfigDict, Path | str]:
    """Returns (config with its overrides applied and locked, run folder or its URL) of a command line.

    argv[0] is the program.

    Raises:
      UserError: a flag or field is unknown, missing, or has a value of the wrong type; there is no such
        config file.
    """
    values, _ = parse_flags(argv, _define_run)
    return values.config, _workdir(values)


def parse_flags(
    argv: Sequence[str], define: Define, with_arguments: bool = False
) -> tuple[absl_flags.FlagValues, list[str]]:
    """Returns the values of the flags that `define` declares, and the words of `argv` that are not flags.

    Raises:
      UserError: a flag is unknown, missing or has a wrong value; there are words without `with_arguments`.
    """
    values = absl_flags.FlagValues()
    required = define(values)
    hint = "--help lists the flags"
    if "config" in required:
        words = parse_with_config(values, with_config_path(argv))
        hint = "a field is set by --config.FIELD=VALUE"
    else:
        try:
            words = values(list(argv))[1:]
        except absl_flags.Error as error:
            raise UserError(str(error)) from error
    if words and not with_arguments:
        raise UserError(f"unexpected argument {words[0]!r}; {hint}")
    for name in required:
        if values[name].value is None:
            raise UserError(f"--{name} is missing: {values[name].help}")
    return values, words


def _define_run(values: absl_flags.FlagValues) -> Sequence[str]:
    """Defines the flags of an entry point that has a config and a run folder.

    The set is separate from absl's global one, so that --help and suggestions leave out the flags that libraries
    define.
    """
    absl_flags.DEFINE_string(
        "workdir",
        None,
        "The folder the run writes to, e.g. --workdir=runs/first or --workdir=gs://BUCKET/first. The same command "
        "continues a run that was stopped.",
        flag_values=values,
    )
    hosts.define_flags(values)
    return ("config", "workdir")


def _with(define: Define, options: Callable[[absl_flags.FlagValues], object] | None) -> Define:
    """Returns `define` with optional flags added."""

    def both(values: absl_flags.FlagValues) -> Sequence[str]:
        required = define(values)
        if options is not None:
            options(values)
        return required

    return both


def _main_arguments(
    values: absl_flags.FlagValues, words: list[str], define: Define | None, has_options: bool, arguments: str
) -> tuple[Any, ...]:
    if define is None:
        return (values.config, _workdir(values), *([values] if has_options else []))
    return (values, words) if arguments else (values,)


def _workdir(values: absl_flags.FlagValues) -> Path | str:
    return values.workdir if "://" in values.workdir else Path(values.workdir)


def _program(argv: Sequence[str]) -> str:
    """'launch.pretrain' when run by `python -m launch.pretrain`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(argv[0]).stem


def _raise_sigint(number: int, frame: Any) -> None:
    """Handles SIGTERM, which schedulers send before they kill, like Ctrl-C: what was done is saved."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.raise_signal(signal.SIGINT)  # reaches the handlers of asyncio and of a training step
    else:  # a process in the background ignores SIGINT
        raise KeyboardInterrupt
