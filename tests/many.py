"""How many examples a slow randomised test takes."""

import os


def many(examples: int) -> int:
    """Returns `examples`, or a quarter of them in CI, whose examples are the same in every run."""
    return examples // 4 if os.environ.get("CI") == "true" else examples
