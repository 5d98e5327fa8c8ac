"""The programs inside a sandbox.

They import the standard library and each other only, because this folder is mounted alone.

start       starts the zygote
zygote      one process per pool, which forks a worker for every sandbox
worker      process 1 of one sandbox: answers requests of the host
namespaces  namespaces, mounts and privileges of one sandbox
layers      workspaces as overlays
seccomp     the system-call filter, assembled in Python
files       file operations of the worker
changes     how a workspace differs from the folder that it was made from
command     commands: how they are started, watched and stopped
shell       the persistent shell
python      `python ...` in a fork instead of a new interpreter

Without namespaces, these replace them:

landlock         what a sandbox can open and which processes it can signal
landlock_filter  a second system-call filter, against what namespaces would hide
confinement      both of them around a worker and its commands; limits on disk and processes, by repeated checks
supervisor       the process around a sandbox that kills all of it, and changes modes and times of its files only
disk             disk usage of a folder, and the removal of its contents
processes        descendants of a process, and signals
"""

import sys

# The modules that an interpreter has loaded when a program starts; read before our own are imported.
_WITH_SITE = {"os", "site", "posixpath", "genericpath", "stat", "_collections_abc"}
STARTUP_MODULES = (frozenset(sys.modules) | _WITH_SITE) - {__name__}
