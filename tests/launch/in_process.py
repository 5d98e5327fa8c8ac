"""Entry points in the process of the tests: what a command prints and its exit code, without the seconds of imports."""

from types import ModuleType

import pytest

from launch import flags, hosts


def run_here(
    capsys, entry: ModuleType, *words: object, arguments: str = "", processes: str = hosts.MULTI_PROCESS
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of an entry point that defines its own flags; no traceback is among them."""
    capsys.readouterr()
    argv = [entry.__name__, *map(str, words)]
    with pytest.raises(SystemExit) as end:
        flags.run(entry.main, argv, define=entry.define, arguments=arguments, processes=processes)
    return end.value.code, *capsys.readouterr()
