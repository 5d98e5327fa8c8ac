"""How EpisodeSpec and Sample travel between a trainer and its workers, exactly."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.frames import Frame
from composer_jax.sampler.policy import PromptLogprobs, Sample, TopLogprobs
from composer_jax.tasks.task import Task


def spec_to_json(spec: EpisodeSpec) -> dict[str, Any]:
    """Returns a JSON-able dict from which `spec_from_json` makes an equal spec."""
    return {
        "task": spec.task.to_json(),
        "seed": spec.seed,
        "compaction": dataclasses.asdict(spec.compaction),
        "group": spec.group,
        "effort": spec.effort,
    }


def spec_from_json(data: Mapping[str, Any]) -> EpisodeSpec:
    """Makes the spec of a dict of `spec_to_json`."""
    compaction = Compaction(**data["compaction"])
    return EpisodeSpec(Task.from_json(data["task"]), data["seed"], compaction, data["group"], data["effort"])


def sample_to_frame(sample: Sample) -> Frame:
    """Returns header and arrays from which `sample_from_frame` makes an equal sample."""
    header: dict[str, Any] = {
        "finish_reason": sample.finish_reason,
        "cached": sample.cached,
        "trained": sample.trained,
        "has_raw": sample.raw_logprobs is not None,
        "has_routing": sample.routing is not None,
        "routing_start": sample.routing_start,
        "top": _pairs(sample.top_logprobs),
        "prompt": None,
    }
    if sample.prompt is not None:
        header["prompt"] = [sample.prompt.logprobs, _pairs(sample.prompt.top_logprobs)]
    arrays = [np.asarray(sample.tokens, "<i4"), np.asarray(sample.logprobs, "<f8"), np.asarray(sample.versions, "<i8")]
    if sample.raw_logprobs is not None:
        arrays.append(np.asarray(sample.raw_logprobs, "<f8"))
    if sample.routing is not None:
        arrays.append(sample.routing)
    return header, arrays


def sample_from_frame(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Sample:
    """Makes the sample of a frame of `sample_to_frame`."""
    tokens, logprobs, versions, *others = arrays
    raw_logprobs = others.pop(0).tolist() if header["has_raw"] else None
    prompt = header["prompt"]
    return Sample(
        tokens.tolist(),
        logprobs.tolist(),
        versions.tolist(),
        header["finish_reason"],
        raw_logprobs=raw_logprobs,
        cached=header["cached"],
        top_logprobs=_dicts(header["top"]),
        prompt=PromptLogprobs(prompt[0], _dicts(prompt[1]) or []) if prompt is not None else None,
        routing=others.pop(0) if header["has_routing"] else None,
        routing_start=header["routing_start"],
        trained=header["trained"],
    )


def _pairs(tops: Sequence[TopLogprobs] | None) -> list[list[tuple[int, float]]] | None:
    """JSON has no integer keys."""
    return None if tops is None else [list(top.items()) for top in tops]


def _dicts(tops: Sequence[Sequence[tuple[int, float]]] | None) -> list[TopLogprobs] | None:
    return None if tops is None else [dict(top) for top in tops]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of leading tokens that two arrays have in common."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
