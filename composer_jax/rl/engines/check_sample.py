"""Checks of what an engine answers, before a learner learns from it."""

from collections.abc import Sequence

import numpy as np

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.policy import Sample

ROUNDING = 1e-3
"""Nats above 0 that a log-probability may have by rounding."""


class BadSample(Exception):
    """An engine has answered what cannot be; the text says what."""


def check_sample(
    sample: Sample,
    context: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    versions: range,
    route_shape: tuple[int, int] | None,
    n_experts: int,
) -> None:
    """Raises BadSample for an answer that this request cannot have.

    Args:
      versions: those that its tokens may have.
      route_shape: (expert layers, experts per token), where params asks for routes.
    """
    n = len(sample.tokens)
    if not 1 <= n <= params.max_tokens:
        raise BadSample(f"{n} tokens, and 1 to {params.max_tokens} were asked for")
    if sample.finish_reason not in ("stop", "length"):
        raise BadSample(f"the finish reason {sample.finish_reason!r}")
    tokens, logprobs = np.asarray(sample.tokens), np.asarray(sample.logprobs, np.float64)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise BadSample(f"the token id {max(tokens.min(), tokens.max(), key=abs)}, and there are {vocab_size}")
    for name, values in (("log-probabilities", sample.logprobs), ("versions", sample.versions)):
        if len(values) != n:
            raise BadSample(f"{len(values)} {name} of {n} tokens")
    if not np.isfinite(logprobs).all() or logprobs.max() > ROUNDING:
        wrong = next(p for p in logprobs.tolist() if not p <= ROUNDING or not np.isfinite(p))
        raise BadSample(f"the log-probability {wrong:g}, which is not a finite number up to 0")
    if wrong := [version for version in set(sample.versions) if version not in versions]:
        raise BadSample(
            f"tokens of the weight version {wrong[0]}, and it can only have {versions.start} to {versions.stop - 1}"
        )
    if not params.return_routing:
        return
    if route_shape is None or sample.routing is None:
        raise BadSample("no routed experts, which were asked for")
    shape = (len(context) + n - 1 - params.routing_start, *route_shape)
    if sample.routing_start != params.routing_start:
        raise BadSample(
            f"routed experts from token {sample.routing_start} on, and {params.routing_start} was asked for"
        )
    if sample.routing.shape != shape or sample.routing.dtype.kind not in "iu":
        raise BadSample(
            f"routed experts {sample.routing.dtype.name}{list(sample.routing.shape)} in place of {list(shape)}"
        )
    if sample.routing.size and (sample.routing.min() < 0 or sample.routing.max() >= n_experts):
        raise BadSample(f"the routed expert {sample.routing.max()}, and there are {n_experts}")
