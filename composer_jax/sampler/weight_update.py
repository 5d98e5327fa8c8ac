"""WeightUpdate: weights that wait for the end of a device call; see Sampler.update_serving."""

import asyncio
import dataclasses
from typing import Literal

from composer_jax.models.model_def import Params
from composer_jax.sampler.weight_checksums import WeightChecksums

UpdateMode = Literal["keep", "recompute", "drain"]


@dataclasses.dataclass(frozen=True)
class WeightUpdate:
    """The arguments of Sampler.update_serving, and the future that it awaits."""

    params: Params
    router_bias: Params
    version: int
    mode: UpdateMode
    copy: bool
    checksums: WeightChecksums | None
    done: asyncio.Future[None]

    def resolve(self, error: Exception | None = None) -> None:
        """Ends update_serving, with an exception if one is given."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
