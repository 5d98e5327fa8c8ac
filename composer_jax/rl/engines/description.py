"""EngineDescription: what an engine says of itself, and RequiredEngine: what a learner needs it to be."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Self

from composer_jax.checkpoint.base_model import NETWORK_FIELDS
from composer_jax.models.config import ModelConfig
from composer_jax.sampler.weight_checksums import WeightChecksum, WeightChecksums


@dataclasses.dataclass(frozen=True)
class EngineDescription:
    """What does not change while an engine runs."""

    name: str
    """HOST:PID."""
    network: str
    """`network_fingerprint` of its weights."""
    tokenizer: str
    """Fingerprint of its tokenizer."""
    end_tokens: tuple[int, ...]
    """Ids that end what it samples."""
    max_model_len: int
    """Tokens of its longest context."""
    slots: int
    """Messages that it samples at once."""
    fitting: int
    """Sessions that fit into its cache however long they grow."""
    returns_routing: bool
    """Whether its samples can have the experts of each token."""
    follows: str
    """The folder of versions that it follows; "" if it follows none."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Makes the description of a dict of dataclasses.asdict. Raises TypeError or KeyError for another dict."""
        return cls(**{**data, "end_tokens": tuple(data["end_tokens"])})


@dataclasses.dataclass(frozen=True)
class RequiredEngine:
    """What an engine has to be so that a learner can learn from what it samples."""

    network: str
    tokenizer: str
    end_tokens: tuple[int, ...]
    max_model_len: int
    """Tokens of the longest context that episodes may reach."""
    route_shape: tuple[int, int] | None
    """(expert layers, experts per token) of the routes that the learner replays; None where it replays none."""
    n_experts: int = 0
    """Routed experts of the network; routes are below it."""

    def find_refusal(self, engine: EngineDescription) -> str:
        """Returns why this engine cannot be used, as the rest of a sentence; "" if it can."""
        if engine.network != self.network:
            other = f"network {engine.network}, not {self.network}"
            return f"it serves another model ({other}); give it the folder of rl.publish"
        if engine.tokenizer != self.tokenizer:
            return (
                f"it has another tokenizer ({engine.tokenizer}, not {self.tokenizer}); give it the folder of rl.publish"
            )
        if set(engine.end_tokens) != set(self.end_tokens):
            return f"its messages end with the tokens {list(engine.end_tokens)}, not with {list(self.end_tokens)}"
        if engine.max_model_len < self.max_model_len:
            return (
                f"its contexts hold {engine.max_model_len} tokens, fewer than sampler.max_model_len="
                f"{self.max_model_len}; start it with --max_model_len={self.max_model_len}"
            )
        if self.route_shape is not None and not engine.returns_routing:
            return (
                "it returns no routed experts, and rl.router_replay needs them; start it with "
                "--return_routed_experts, or use rl.router_replay=off"
            )
        if not engine.follows:
            return "it follows no folder of versions; start it with --checkpoint=patches:FOLDER or --follow=FOLDER"
        return ""


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """What an engine does at one moment."""

    version: int = -1
    """Of its weights."""
    checksums: WeightChecksums = ()
    """Of its weights (sampler/weight_checksums.py)."""
    progress: int = 0
    """Tokens that it has computed so far."""
    is_paused: bool = False
    """Whether somebody has paused it."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Makes the status of a dict of dataclasses.asdict. Raises TypeError or KeyError for another dict."""
        checksums = tuple(WeightChecksum(**{**one, "shape": tuple(one["shape"])}) for one in data["checksums"])
        return cls(**{**data, "checksums": checksums})


def network_fingerprint(config: ModelConfig) -> str:
    """Returns 16 hexadecimal digits that depend on which network it is, not on how it is computed."""
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name in NETWORK_FIELDS}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
