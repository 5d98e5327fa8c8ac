"""One of every extension in one file, which test_extensions_pipeline.py copies out of the repository.

Each extension adds a line to the file $EXTENSION_CALLS when it is used; a jitted one when it is traced.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from composer_jax.agent.episode import Episode
from composer_jax.agent.tools import Tool, object_schema
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.token_source import IN_MEMORY
from composer_jax.models.gqa import GroupedQueryAttention
from composer_jax.models.parameter import gather_param, parameter
from composer_jax.parallel.dispatch import Dispatch
from composer_jax.parallel.dispatch.dense import dense
from composer_jax.seeds import hash_seed
from composer_jax.tasks.grader import Case, CaseGrader
from composer_jax.tasks.task import Split, Task
from composer_jax.train.losses import LanguageLoss, LanguageLossConfig, Loss, LossOutput
from composer_jax.train.optimizer import Optimizer, OptimizerConfig, learning_rate_schedule


def record(name: str) -> None:
    with Path(os.environ["EXTENSION_CALLS"]).open("a") as file:
        file.write(f"{name}\n")


class ScaledAttention(GroupedQueryAttention):
    """An attention kind: grouped-query attention whose output has one trained factor per number."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.factor = parameter(jnp.ones(config.d_model, config.param_dtype), "embed")

    def __call__(self, x_BSD, positions_BS, mask, windowed=None):
        record("attention")
        return super().__call__(x_BSD, positions_BS, mask, windowed) * gather_param(self.factor, x_BSD.dtype)

    def extend(self, x_BSD, positions_BS, keys, write):
        record("attention with a cache")
        return super().extend(x_BSD, positions_BS, keys, write) * gather_param(self.factor, x_BSD.dtype)


def cut_messages(episode: Episode) -> float:
    """A behaviour with a price: whether a message had no calls, as one that its limit cut."""
    record("behaviour")
    return float(episode.outcome == "no_call")


def recorded_dense(*args: Any, **options: Any) -> tuple[Any, None]:
    record("dispatch")
    return dense(*args, **options)


recorded_dispatch = Dispatch(recorded_dense, may_drop=False)
"""An expert dispatch. RL and evaluation refuse one that may drop pairs, and one that does not say so."""


def halved(params: dict[str, Any], config, key: jax.Array) -> dict[str, Any]:
    """An initialiser."""
    record("initialiser")
    return jax.tree.map(lambda weight: weight / 2, params)


class RecordedFormat(CompactFormat):
    """A chat format."""

    def render(self, messages, tools=()):
        record("chat format")
        return super().render(messages, tools)


def recorded_loss(config: LanguageLossConfig) -> Loss:
    """A loss."""

    def loss(decoder, batch, normaliser) -> LossOutput:
        record("loss")
        return LanguageLoss(config)(decoder, batch, normaliser)

    return loss


def momentum(config: OptimizerConfig, steps: int) -> Optimizer:
    """An optimizer."""
    record("optimizer")

    def make_transformation(definition, mesh):
        return optax.chain(optax.clip_by_global_norm(config.clip), optax.trace(config.b1))

    return Optimizer(make_transformation, learning_rate_schedule(config, steps))


@dataclasses.dataclass(frozen=True)
class CountingRows:
    """A data source: rows that count upwards."""

    stride: int

    def rows(self, *, seq_len: int, batch_size: int, seed: int) -> grain.IterDataset:
        record("data source")

        def row(index: int) -> dict[str, np.ndarray]:
            tokens = 16 + (index + self.stride * np.arange(seq_len)) % 200
            return {
                "tokens": tokens.astype(np.int32),
                "segments": np.ones(seq_len, np.int32),
                "weights": np.ones(seq_len, np.float32),
            }

        return grain.MapDataset.range(2**40).map(row).to_iter_dataset(IN_MEMORY)

    def identity(self) -> Mapping[str, int | str]:
        return {"stride": self.stride}


def counting_rows(inputs, *, stride: int) -> CountingRows:
    return CountingRows(stride)


async def count_lines(workspace: Workspace) -> str:
    return f"{sum(len(data.splitlines()) for data in workspace.files.values())} lines"


COUNT_LINES = Tool("count_lines", "Count the lines of all files.", object_schema(), count_lines, read_only=True)


class Offset:
    """A task family, whose tasks have a tool of this file."""

    def generate(self, split: Split, seed: int, index: int) -> Task:
        record("task family")
        offset = 10 + hash_seed("offset", split, seed, index) % 90
        return Task(
            id=f"offset-{split}-{seed}-{index}",
            family="offset",
            split=split,
            instruction=f"Return x + {offset}.",
            files={"offset.py": "def f(x):\n    return x\n"},
            tools=("own_extensions:COUNT_LINES", "edit", "finish"),
            grader=CaseGrader((Case("offset", "f", (1,), 1 + offset),)),
            metadata={"new": f"return x + {offset}"},
        )


def read_seeds(path: Path, options) -> Sequence[Any] | None:
    """A task format: a file of seeds, one task each."""
    if path.suffix != ".seeds":
        return None
    record("task format")
    return [partial(_noted, int(line), options.tools) for line in path.read_text().split()]


def _noted(seed: int, tools: tuple[str, ...]) -> Task:
    return dataclasses.replace(Offset().generate("heldout", seed, 0), family="noted", tools=tools)


class Solutions:
    """A source of SFT conversations: the instruction of a task and the edit that solves it."""

    def __init__(self, context, count: int):
        self.context, self.count = context, count

    def traces(self) -> list[tuple[np.ndarray, np.ndarray]]:
        record("conversations")
        chat, traces = self.context.chat, []
        for index in range(self.count):
            task = Offset().generate("train", hash_seed("sft", self.context.seed), index)
            given = [*chat.render([Message("user", task.instruction)]), *chat.generation_prompt]
            edit = ToolCall("edit", {"path": "offset.py", "old": "return x", "new": task.metadata["new"]})
            answer = chat.render_assistant("", [edit])
            traces.append((np.array(given + answer, np.int32), np.arange(len(given + answer)) >= len(given)))
        return traces

    def report(self) -> dict[str, Any]:
        return {"solutions": self.count}


@dataclasses.dataclass(frozen=True)
class FixedBaseline:
    """An RL algorithm: the distance of a reward from a fixed number."""

    baseline: float

    def __call__(self, rewards: Sequence[float]) -> np.ndarray:
        record("algorithm")
        return np.asarray(rewards, np.float32) - np.float32(self.baseline)


class RowCount:
    """A metric sink that counts the rows of each stage."""

    def __init__(self, workdir: Path, stage: str, config: Mapping[str, Any]):
        self.file, self.rows = workdir / f"rows_{stage}", 0

    def truncate_after(self, step: int) -> None:
        record("metric sink")

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows += 1

    def close(self) -> None:
        self.file.write_text(str(self.rows))
