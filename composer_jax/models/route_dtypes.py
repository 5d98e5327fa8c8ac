"""Numbers of experts in batches, where a choice may be unknown. Without JAX: whoever packs a batch uses them."""

import numpy as np

NO_ROUTE = -1
"""For a choice that is not known. An array of uint8 has the same bits, 255 (`replay_dtype`)."""


def replay_dtype(n_experts: int) -> np.dtype:
    """Returns the smallest dtype that holds the number of every expert and NO_ROUTE."""
    return np.dtype(np.uint8 if n_experts < 256 else np.int16)


def no_route(dtype: np.dtype) -> np.generic:
    """Returns NO_ROUTE as a number of this dtype."""
    return np.int16(NO_ROUTE).astype(dtype)
