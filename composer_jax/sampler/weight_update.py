"""WeightUpdate: weights that wait for the end of a device call; see Sampler.update_serving."""

import asyncio
import dataclasses
from typing import Literal

from composer_jax.models.model_def import Params

UpdateMode = Literal["keep", "recompute", "drain"]


@dataclasses.dataclass(frozen=True)
class WeightUpdate:
    """The arguments of Sampler.update_serving, and the future that it awaits."""

    params: Params
    router_bias: Params
    version: int
    mode: UpdateMode
    copy: bool
    done: asyncio.Future[None]
