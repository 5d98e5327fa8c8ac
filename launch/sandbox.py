"""Runs a command in a sandbox, on a copy of a folder.

    python -m launch.sandbox --workspace=DIR --packages=PACKAGES -- python -m pytest -q
    python -m launch.sandbox --workspace=DIR --write-back -- sh -c 'sort -o names.txt names.txt'

The command sees a copy of the folder as /workspace, a read-only system, and nothing else of this machine: no home, no
environment, no network unless --network is given. PACKAGES is a folder made by `pip install --target`. The folder
itself changes only with --write-back: the changes of the command are then written to it after the command, however it
ended. The exit code is that of the command, or 124 (out of time), 137 (out of memory), 153 (more than 1 GiB of output),
125 (the sandbox itself failed). Output is printed at the end; the middle of long output is left out. Standard input,
unless it is a terminal, is read to its end first and passed to the command; `< /dev/null` passes none.
"""

import asyncio
import math
import os
import sys
from pathlib import Path

from absl import flags as absl_flags

from composer_jax.errors import UserError
from launch import flags, hosts


def define(values):
    def integer(name, default, meaning):
        absl_flags.DEFINE_integer(name, default, meaning, lower_bound=1, flag_values=values)

    absl_flags.DEFINE_string("workspace", None, "The folder the command works on.", flag_values=values)
    absl_flags.DEFINE_bool("network", False, "Let the command use the network.", flag_values=values)
    absl_flags.DEFINE_bool("write-back", False, "Write the changes of the command to the folder.", flag_values=values)
    absl_flags.DEFINE_string("packages", None, "A folder of packages for Python (pip --target).", flag_values=values)
    absl_flags.DEFINE_string("backend", "auto", "How to isolate: auto, or a backend by name.", flag_values=values)
    absl_flags.DEFINE_float("timeout", 60.0, "Seconds.", lower_bound=0.001, flag_values=values)
    integer("memory", 2048, "MiB of all processes together.")
    integer("disk", 1024, "MiB that the command may change in the folder, and again in /tmp.")
    integer("processes", 256, "Processes and threads at once.")
    integer("output", 8, "MiB of output that are shown, of each stream.")
    return ("workspace",)


def main(values, command):
    from composer_jax.sandbox import SandboxLimits, cli

    if not command:
        raise UserError("a command is missing: python -m launch.sandbox --workspace=DIR -- COMMAND...")
    limits = SandboxLimits(
        timeout_s=values.timeout,
        cpu_s=math.ceil(values.timeout + 1) * (os.cpu_count() or 1),  # one process may use all cores
        memory_mb=values.memory,
        processes=values.processes,
        file_mb=values.disk,
        open_files=1024,
        workspace_mb=values.disk,
        tmp_mb=values.disk,
        output_kb=1024 * values.output,
        output_stop_mb=1024,
    )
    code = cli.main(
        command,
        Path(values.workspace),
        limits=limits,
        backend=values.backend,
        network=values.network,
        packages=Path(values.packages) if values.packages else None,
        stdin=b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read(),
        write_back=values["write-back"].value,
    )
    sys.exit(asyncio.run(code))


if __name__ == "__main__":
    flags.run(main, define=define, arguments="-- COMMAND...", processes=hosts.NO_DEVICES)
