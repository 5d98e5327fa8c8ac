"""Routes: the experts that computed each token of a transcript, recorded by the engine for router replay.

An array of routes is [n,L,k]: the k experts of n tokens in each of L expert layers, best first.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np


def compact_routes(ids: np.ndarray) -> np.ndarray:
    """Returns a copy of expert ids in uint8 where all of them fit, else in uint16."""
    return ids.astype(np.uint8 if ids.max(initial=0) < 256 else np.uint16)


def encode_routes(routes: np.ndarray) -> dict[str, Any]:
    """Returns a JSON-able dict from which `decode_routes` makes an equal array; the bytes are base64."""
    little_endian = routes.astype(routes.dtype.newbyteorder("<"))
    data = base64.b64encode(little_endian.tobytes()).decode("ascii")
    return {"dtype": routes.dtype.name, "shape": list(routes.shape), "data": data}


def decode_routes(encoded: Mapping[str, Any]) -> np.ndarray:
    """Returns the array of `encode_routes`. Raises ValueError if the bytes are not those of its shape."""
    dtype = np.dtype(encoded["dtype"])
    flat = np.frombuffer(base64.b64decode(encoded["data"]), dtype.newbyteorder("<"))
    return flat.reshape(encoded["shape"]).astype(dtype)
