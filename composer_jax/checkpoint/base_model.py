"""Base: the weights that a run starts from, with the network, tokenizer and chat format that belong to them.

config.base is the address of a published model (hf:DIR, gguf:FILE) or of a native checkpoint (RUN/checkpoints/STAGE).
Fields of config.model that describe the network then come from the base. A field that the config sets as well must
agree with the base; fields that say how the network is computed stay the config's. A run may have more MTP modules than
its base, as Composer 2 trains them on a base without any (arXiv 2603.24477, section 3).
"""

import dataclasses
import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.checkpoint import Checkpoint, open_checkpoint
from composer_jax.errors import UserError
from composer_jax.models.config import COMPUTATION_FIELDS, ModelConfig
from composer_jax.models.model_def import ModelDef, Params

UNSTORED_FIELDS = ("init", "init_std")
"""Fields about initial weights, which a base has already."""
NETWORK_FIELDS = tuple(
    field.name for field in dataclasses.fields(ModelConfig) if field.name not in (*COMPUTATION_FIELDS, *UNSTORED_FIELDS)
)


@dataclasses.dataclass(frozen=True)
class ModelOfBase(ModelConfig):
    """The model section of a config that leaves the network to config.base and says how it is computed.

    A field of the network counts as stated if it differs from its default; the values are checked when run_config has
    read the base.
    """

    vocab_size: int = 0
    d_model: int = 0
    n_layers: int = 0
    n_heads: int = 0
    qk_rope_dim: int = 0
    v_head_dim: int = 0
    max_context: int = 0

    def __post_init__(self) -> None:
        """Checks nothing, because the sizes are unknown."""

    def leaves_to_base(self, name: str) -> bool:
        """Returns whether the base says what a field is."""
        field = type(self).__dataclass_fields__[name]
        return name in NETWORK_FIELDS and getattr(self, name) == field.default


@functools.lru_cache(maxsize=2)  # the base of a run, and the policy of a replay
def open_base(base: str) -> Checkpoint:
    """Opens the checkpoint at the address `base`, once per process. Raises UserError if there is none."""
    return open_checkpoint(base)


def with_base_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config with the network fields that are None filled in from config.base.

    A model section that states its sizes (vocab_size) is complete, and the base is not read.

    Raises:
      UserError: sizes are missing and there is no base, or none can be read there.
    """
    model: Any = config.get("model")
    if not hasattr(model, "items") or model.get("vocab_size", 0) is not None:
        return config
    base = config.get("base")
    if not base:
        raise UserError(
            "config.base is empty and config.model has no sizes; name a base, e.g. --config.base=hf:DIR, or use a "
            "config that describes a network."
        )
    theirs = dataclasses.asdict(open_base(base).config)
    fields = {name: theirs.get(name) if value is None else value for name, value in model.items()}
    plain = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    return plain | {"model": fields}


def check_base_model(base: str, model: ModelConfig) -> None:
    """Raises a UserError that names the first network field in which the config differs from its base.

    A config may shorten max_context, and may extend it by a YaRN that the base does not have or has with a smaller
    factor. It may add MTP modules, but not leave out those of a native checkpoint. The folder of a published model
    counts as one without any, because whether it has modules is known only from its tensors.
    """
    theirs = open_base(base).config
    extension = model.yarn
    if extension is not None and theirs.yarn is not None and extension.factor <= theirs.yarn.factor:
        extension = None
    longest = theirs.max_context
    if extension is not None:
        longest = max(longest, int(extension.factor * extension.original_context))
    for name in NETWORK_FIELDS:
        here, there = getattr(model, name), getattr(theirs, name)
        if name == "yarn" and extension is not None:
            continue
        if name == "max_context":
            if here > longest:
                raise UserError(
                    f"config.model.max_context={here} is longer than the {longest} tokens that {base} allows; use at "
                    f"most {longest}, or extend it by config.model.yarn."
                )
        elif here != there and not (name == "n_mtp_modules" and here > there):
            raise UserError(
                f"config.model.{name}={here!r} differs from {name}={there!r} of {base}; leave it out, because the "
                "base says what the network is."
            )


def load_base_weights(base: str, definition: ModelDef, mesh: Mesh, seed: int) -> tuple[Params, Params]:
    """Loads (params, router_bias) of a base onto the mesh, in the param_dtype of the run's network.

    MTP modules that the base lacks are those of ModelDef.init with `seed`.
    """
    check_base_model(base, definition.config)
    n_modules, dtype = definition.config.n_mtp_modules, definition.config.param_dtype
    loaded = open_base(base).load(mesh, dtype, mtp=n_modules > 0)
    theirs = loaded.params, loaded.router_bias
    if loaded.definition.config.n_mtp_modules == n_modules:
        return theirs
    modules = definition.init_mtp(seed, mesh)
    if loaded.definition.config.n_mtp_modules:
        shardings = tuple(tree.get("mtp") for tree in definition.shardings(mesh))
        # The first modules of a chain do not depend on later ones.
        first = lambda old, new: jnp.concatenate([old[:n_modules], new[len(old) :]])  # noqa: E731
        join = jax.jit(lambda old, new: jax.tree.map(first, old, new), out_shardings=shardings)
        modules = join(tuple(tree.get("mtp") for tree in theirs), modules)
    params, router_bias = (
        tree if own is None else tree | {"mtp": own} for tree, own in zip(theirs, modules, strict=True)
    )
    return params, router_bias


def copy_base_files(base: str, folder: Path) -> None:
    """Copies tokenizer, chat template and generation defaults of a base into a folder, all or none.

    Report and resume then do not need the base.

    Raises:
      UserError: there are no weights at the address, or no tokenizer beside them.
    """
    files = open_base(base).tokenizer_files()
    if files is None:
        raise UserError(f"{base} has no tokenizer.json; add the tokenizer of the model to that folder.")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in files.items():
        write_atomically(partial / name, content)
    partial.rename(folder)
