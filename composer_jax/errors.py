"""The one exception that is meant for a person."""


class UserError(Exception):
    """Bad input or a missing precondition: one sentence that names the value and the way out.

    Entry points print the sentence and exit with code 2; everything else propagates with its traceback.
    """
