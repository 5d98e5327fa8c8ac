"""What runs inside the walls. Standard library only and relative imports only: the folder is mounted alone.

start     runs the zygote
zygote    one process per pool, inside bubblewrap: forks a worker for every sandbox
namespaces   the walls of one sandbox: namespaces, mounts, capabilities
seccomp   the system-call filter, assembled in Python
worker    pid 1 of one sandbox: answers the host's requests
files     the worker's file operations
command   the worker's commands: start, watch, stop, and say how they ended
python    `python ...` served by fork instead of by starting an interpreter

Where the machine gives no namespaces, these stand in for them:

landlock       what a sandbox can open, and whom it can signal
landlock_filter  what else namespaces would hide, refused by number
modes          changes of modes and times, for files of the sandbox only
supervisor         the process around a sandbox, which ends all of it
confinement    all of this around a worker and around its commands
quota          limits held by looking
disk           what a folder holds, and how to remove it
processes      which processes are below one, and how to end them
"""

import sys

# What a real interpreter has loaded when a program starts; read before anything of ours is imported.
_WITH_SITE = {"os", "site", "posixpath", "genericpath", "stat", "_collections_abc"}
STARTUP_MODULES = (frozenset(sys.modules) | _WITH_SITE) - {__name__}
