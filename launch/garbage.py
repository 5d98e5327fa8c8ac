"""How often Python's garbage collector looks for objects that refer to themselves in circles."""

import gc

THRESHOLDS = 50_000, 10, 10
"""Of gc.set_threshold in this project's processes.

A process that samples has millions of objects, a few for every page of every cached context. They are freed without the
collector, which with Python's thresholds looks at them so often that it takes a third of the host's time of a device
call (`python -m benchmarks.fleet --parts=scheduler`). What refers to itself lives longer with these, so code that holds
large arrays breaks its circles.
"""


def collect_rarely() -> None:
    """Makes this process look for circles after 50,000 new objects; Python's default is 700 or 2,000."""
    gc.set_threshold(*THRESHOLDS)
