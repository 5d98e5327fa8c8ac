"""SamplerStats: the numbers of a sampler at one moment."""

import dataclasses


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
