"""How EpisodeSpec and Sample travel between a trainer and its workers, exactly."""

import dataclasses
import itertools
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
    """Returns header and arrays from which `sample_from_frame` makes an equal sample.

    A token takes 8 bytes beside its routes, if its log-probabilities are float32 and drawn at temperature 1.
    """
    logprobs, raw = _exact(sample.logprobs), None if sample.raw_logprobs is None else _exact(sample.raw_logprobs)
    has_own_raw = raw is not None and not np.array_equal(raw, logprobs)
    header: dict[str, Any] = {
        "finish_reason": sample.finish_reason,
        "cached": sample.cached,
        "trained": sample.trained,
        "versions": [(version, len(list(run))) for version, run in itertools.groupby(sample.versions)],
        "raw": None if raw is None else "own" if has_own_raw else "equal",
        "has_routing": sample.routing is not None,
        "routing_start": sample.routing_start,
        "top": _pairs(sample.top_logprobs),
        "prompt": None,
    }
    if sample.prompt is not None:
        header["prompt"] = [sample.prompt.logprobs, _pairs(sample.prompt.top_logprobs)]
    arrays = [np.asarray(sample.tokens, "<i4"), logprobs]
    if raw is not None and has_own_raw:
        arrays.append(raw)
    if sample.routing is not None:
        arrays.append(sample.routing)
    return header, arrays


def sample_from_frame(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Sample:
    """Makes the sample of a frame of `sample_to_frame`."""
    tokens, logprobs, *others = arrays
    raw_logprobs = None
    if header["raw"] is not None:
        raw_logprobs = (others.pop(0) if header["raw"] == "own" else logprobs).tolist()
    prompt = header["prompt"]
    versions = itertools.chain.from_iterable(itertools.repeat(version, count) for version, count in header["versions"])
    return Sample(
        tokens.tolist(),
        logprobs.tolist(),
        list(itertools.islice(versions, len(tokens) + 1)),  # more are refused by their number
        header["finish_reason"],
        raw_logprobs=raw_logprobs,
        cached=header["cached"],
        top_logprobs=_dicts(header["top"]),
        prompt=PromptLogprobs(prompt[0], _dicts(prompt[1]) or []) if prompt is not None else None,
        routing=others.pop(0) if header["has_routing"] else None,
        routing_start=header["routing_start"],
        trained=header["trained"],
    )


def _exact(logprobs: Sequence[float]) -> np.ndarray:
    """Returns float32 if that holds these numbers exactly, as it does those of our engines; otherwise float64."""
    wide = np.asarray(logprobs, "<f8")
    with np.errstate(over="ignore"):
        narrow = wide.astype("<f4")
    return narrow if np.array_equal(narrow.astype("<f8"), wide) else wide


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
