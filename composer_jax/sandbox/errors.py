"""What the calls of a sandbox raise."""


class SandboxDied(RuntimeError):
    """The sandbox itself failed. The machine is the cause, never the code that ran in it; retry in another sandbox."""


class SandboxFileError(Exception):
    """A file operation failed: the path is missing, outside the workspace, not a file, or the disk is full.

    The message is one sentence that can be shown to the agent.
    """
