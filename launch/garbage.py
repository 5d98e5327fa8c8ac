"""How often Python's garbage collector looks for objects that refer to themselves in circles."""

import gc

THRESHOLDS = 50_000, 10, 10
"""Of gc.set_threshold; Python's own are 700, 10 and 10.

A process that samples has millions of objects, a few for every page of every cached context. They are freed without the
collector, which with Python's thresholds looks at them so often that it takes a third of the host's time of a device
call (`python -m benchmarks.fleet --parts=scheduler`). Young circles keep what 50,000 objects hold, at most, for longer.
"""


def collect_rarely() -> None:
    """Makes this process look for circles after 50,000 new objects instead of 700."""
    gc.set_threshold(*THRESHOLDS)
