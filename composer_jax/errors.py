"""The exceptions that are meant for a person."""

BAD_INPUT = 2
"""Exit code of an entry point that ends with a UserError, whose sentence is the last line on stderr."""


class UserError(Exception):
    """Bad input or a missing precondition: one sentence that names the value and the way out.

    Entry points print the sentence and exit with code BAD_INPUT; everything else propagates with its traceback.
    """


class OtherProcessError(Exception):
    """Another process of this run failed or is gone: one sentence that says which and why.

    Entry points print the sentence and exit with code 1, as the process that failed does.
    """
