"""What the calls of a sandbox raise."""


class SandboxDied(RuntimeError):
    """The sandbox itself failed. One death says nothing about the code that ran in it; retry in another sandbox."""


class SandboxKilled(SandboxDied):
    """Two sandboxes died under the same command, and one without it lives: the command kills its sandbox."""


class SandboxFileError(Exception):
    """A file operation failed: the path is missing, outside the workspace, not a file, or the disk is full.

    The message is one sentence that can be shown to the agent.
    """
