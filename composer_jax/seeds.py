"""Seeds and random generators that depend on their arguments only, on every machine and in every process."""

import hashlib
import random


def hash_seed(*parts: object) -> int:
    """Returns a uint32 that is a hash of all parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")


def seeded_random(*parts: object) -> random.Random:
    """Returns a generator seeded with a hash of the parts' texts (independent of PYTHONHASHSEED)."""
    text = "/".join(str(part) for part in parts)
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big"))
