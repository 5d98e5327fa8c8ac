"""SamplerStats: the numbers of a sampler at one moment."""

import dataclasses

from composer_jax.sampler.drafts import Speculation
from composer_jax.sampler.scheduler import Scheduler


@dataclasses.dataclass(frozen=True)
class SamplerStats:
    """What a sampler is doing, and has done."""

    waiting: int
    running: int
    preemptions: int
    """Running requests that gave their pages to others, and ran again later."""
    pages: int
    held_pages: int
    """Pages of running requests and open sessions; the others are free, or free when they are needed."""
    live_tokens: int
    """Tokens of running requests and open sessions, those in shared pages once."""
    drafted: tuple[int, ...]
    """Draft tokens that were verified, by their place in the draft."""
    accepted: tuple[int, ...]
    """Those of them that were sampled."""


def read_stats(scheduler: Scheduler, speculation: Speculation | None) -> SamplerStats:
    """Returns the numbers of this moment; speculation is None without drafts."""
    return SamplerStats(
        waiting=len(scheduler.waiting),
        running=len(scheduler.running),
        preemptions=scheduler.preemptions,
        pages=sum(pool.n_pages for pool in scheduler.pools),
        held_pages=scheduler.n_held_pages,
        live_tokens=scheduler.n_live_tokens,
        drafted=() if speculation is None else tuple(speculation.drafted),
        accepted=() if speculation is None else tuple(speculation.accepted),
    )
