"""What runs inside the walls. Standard library only and relative imports only: the folder is mounted alone.

start     runs the zygote
zygote    one process per pool, inside bubblewrap: forks a worker for every sandbox
namespaces   the walls of one sandbox: namespaces, mounts, capabilities
seccomp   the system-call filter, assembled in Python
worker    pid 1 of one sandbox: answers the host's requests
files     the worker's file operations
command   the worker's commands: start, watch, stop, and say how they ended
python    `python ...` served by fork instead of by starting an interpreter
"""

import sys

# What a real interpreter has loaded when a program starts; read before anything of ours is imported.
_WITH_SITE = {"os", "site", "posixpath", "genericpath", "stat", "_collections_abc"}
STARTUP_MODULES = (frozenset(sys.modules) | _WITH_SITE) - {__name__}
