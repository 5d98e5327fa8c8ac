"""Layout: how a training step is laid out on a slice, and which layouts a config's network allows."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_jax.errors import UserError
from composer_jax.models.config import CHECKPOINT_NAMES, ModelConfig
from composer_jax.parallel.mesh import AXES, BATCH_AXES
from composer_jax.schema.run_config import RunConfig

STAGES = ("pretrain", "sft")
"""Stages whose step is one program for rows of one shape."""
WITHOUT_DROPS = ("ring",)
"""Kinds of dispatch that compute every chosen expert, whatever the load: changing to one changes no result."""
RECOMPUTED_LATER = tuple(name for name in CHECKPOINT_NAMES if name != "feed_forward")
"""Values that the backward pass reads; the output of the feed-forward is only added to the residual stream."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The fields of a run's config that place its step on devices and change no result beyond rounding."""

    axes: tuple[int, ...]
    """Devices along each of AXES."""
    batch_size: int
    """Rows of a step on all devices."""
    dispatch: str
    expert_chunk: int | None
    head_chunk: int | None
    remat_saves: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> devices along it."""
        return dict(zip(AXES, self.axes, strict=True))

    def shards(self, axes: Sequence[str] = BATCH_AXES) -> int:
        """Returns the product of the sizes of these axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def fields(self, stage: str) -> dict[str, Any]:
        """Returns {path of a config's field: value}; mesh axes of size 1 included."""
        return {f"mesh.{axis}": size for axis, size in self.sizes.items()} | {
            f"{stage}.batch_size": self.batch_size,
            "model.dispatch": self.dispatch,
            "model.expert_chunk": self.expert_chunk,
            "model.head_chunk": self.head_chunk,
            "model.remat_saves": self.remat_saves,
        }

    def apply(self, config: Mapping[str, Any], stage: str) -> dict[str, Any]:
        """Returns a copy of a nested config with this layout."""
        changed = {name: dict(section) if isinstance(section, Mapping) else section for name, section in config.items()}
        for path, value in self.fields(stage).items():
            section, field = path.split(".")
            changed[section][field] = value
        return changed

    def __str__(self) -> str:
        mesh = " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "one device"
        saves = ",".join(self.remat_saves) or "nothing"
        chunks = f"experts {self.expert_chunk or 'whole'}, head {self.head_chunk or 'whole'}"
        return f"{mesh}; {self.batch_size} rows; {self.dispatch}; chunks: {chunks}; keeps {saves}"


def config_layout(run: RunConfig, stage: str, devices: int) -> Layout:
    """Returns the layout that a config asks for on this many devices.

    Raises:
      UserError: an axis of -1 and the others leave a remainder, or the stage accumulates gradients.
    """
    if (accumulate := run.training(stage).accumulate) > 1:
        raise UserError(
            f"{run.section(stage)}.accumulate={accumulate}: layouts are estimated for steps of one batch; search with "
            "accumulate=1 and the rows of a micro-batch."
        )
    sizes = run.mesh.axis_sizes
    fixed = math.prod(max(size, 1) for size in sizes.values())
    if -1 in sizes.values() and devices % fixed:
        raise UserError(f"{devices} devices do not divide over the other mesh axes, {fixed}; change config.mesh.")
    axes = tuple(devices // fixed if size == -1 else size for size in sizes.values())
    model = run.model
    return Layout(
        axes, run.training(stage).batch_size, model.dispatch, model.expert_chunk, model.head_chunk, model.remat_saves
    )


def legal_axes(model: ModelConfig, devices: int, rows: int, tokens: int) -> Iterator[tuple[int, ...]]:
    """Yields the sizes of AXES whose product is `devices` and that divide the network and the batch.

    Weights are checked again when the network is placed; this leaves out what can be told from the config.

    Args:
      rows, tokens: of the batch.
    """
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    contexts = [n for n in divisors if n == 1 or tokens % (2 * n) == 0]  # zigzag_order
    for data, expert, context, tensor in itertools.product(divisors, divisors, contexts, divisors):
        replica, rest = divmod(devices, data * expert * context * tensor)
        axes = (replica, data, expert, context, tensor)
        if rest or rows % (replica * data * expert):
            continue
        if model.n_experts % (expert * tensor) if model.n_experts else expert > 1:
            continue
        if not (model.n_heads % tensor or model.vocab_size % tensor or model.d_model % (data * context)):
            yield axes


def layouts(
    own: Layout, axes: tuple[int, ...], tokens: int, *, batch_sizes: Sequence[int], dispatches: Sequence[str]
) -> Iterator[Layout]:
    """Yields the layouts on one mesh: batch, dispatch, chunks, and what is kept for the backward pass.

    Chunks are the config's own, whole, and halves and quarters of a device's tokens.

    Args:
      own: the config's layout.
      tokens: of a row.
      batch_sizes, dispatches: beside the config's own.
    """
    saves = [
        tuple(names)
        for count in range(len(RECOMPUTED_LATER) + 1)
        for names in itertools.combinations(RECOMPUTED_LATER, count)
    ]
    if own.remat_saves not in saves:
        saves.append(own.remat_saves)
    for batch in dict.fromkeys((own.batch_size, *batch_sizes)):
        place = dataclasses.replace(own, axes=axes, batch_size=batch)
        if batch % place.shards():
            continue
        held = batch * tokens // place.shards((*BATCH_AXES, "context"))  # tokens of a device
        parts = [held // n for n in (2, 4) if held % n == 0]
        expert_chunks = dict.fromkeys((own.expert_chunk, None, *parts))
        head_chunks = dict.fromkeys((own.head_chunk, *(size for size in (2048, 4096) if size < held)))
        exchanged = place.shards(("expert", "tensor")) > 1
        kinds = dict.fromkeys((own.dispatch, *dispatches) if exchanged else (own.dispatch,))
        for kind, chunk, head, names in itertools.product(kinds, expert_chunks, head_chunks, saves):
            yield dataclasses.replace(place, dispatch=kind, expert_chunk=chunk, head_chunk=head, remat_saves=names)
