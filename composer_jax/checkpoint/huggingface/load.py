"""Reads a Hugging Face checkpoint directly into sharded arrays, layer by layer."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.checkpoint.folder import Folder
from composer_jax.checkpoint.huggingface.config_json import TEXT_TOWERS, count_mtp_modules, model_config, text_config
from composer_jax.checkpoint.huggingface.quantized import CheckpointFiles
from composer_jax.checkpoint.huggingface.safetensors_files import SafetensorsFolder
from composer_jax.checkpoint.huggingface.tensor_layout import (
    TensorLayout,
    absent_leaves,
    copy_into,
    flatten_tree,
    leaf_shapes,
)
from composer_jax.checkpoint.huggingface.weights import TensorSource, group_by_leaf, match_layouts, unflatten_leaves
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.observe.progress import Progress

_THREADS = 8  # each holds one tensor; a quantised one takes several times its size while it is dequantised

_Tensors = Sequence[tuple[str, TensorLayout]]


class Loaded(NamedTuple):
    """A network and its weights."""

    definition: ModelDef
    params: Params
    router_bias: Params


def load_hf(
    path: str | Path | Folder, mesh: Mesh | None = None, dtype: str | None = None, *, mtp: bool = True
) -> Loaded:
    """Loads the network of a Hugging Face checkpoint folder, with its weights sharded over the mesh.

    Reads float files and the formats of quantized.py: fp8 in blocks, packed int4, mxfp4. Needs host memory for about
    two layers of the largest leaf, and one tensor per thread (as float32 if it is quantised). Every process of a
    multi-controller run makes the same call and reads the shards of its own devices.

    Args:
      path: a local folder, a URL that fsspec knows (gs://bucket/folder), or a Folder.
      mesh: None puts everything on the first device of this process.
      dtype: of the weights and of the computation: float32, bfloat16 or float16. None is the "torch_dtype" of
        config.json, or bfloat16.
      mtp: whether to read the multi-token-prediction modules that config.json counts. Folders written by transformers
        count them and do not contain them, which is accepted.

    Raises:
      UserError: an architecture that cannot be read; tensors that are missing, unexpected, of another shape or cut
        short; a mesh that does not divide the weights. All of it before any weight is read (but copies of the
        embedding and the head, which have to be equal).
    """
    folder = path if isinstance(path, Folder) else Folder(path)
    described = folder.json("config.json")
    text = text_config(described)
    config = model_config(described)
    dtype = require_float_dtype(dtype or text.get("torch_dtype") or text.get("dtype") or "bfloat16")
    quantization = text.get("quantization_config") or described.get("quantization_config")
    prefix = "language_model." if described.get("model_type") in TEXT_TOWERS else ""
    files = SafetensorsFolder(folder)
    modules = tuple(f"model.layers.{config.n_layers + i}." for i in range(count_mtp_modules(described)))
    read_modules = mtp and any(name.removeprefix(prefix).startswith(modules) for name in files.tensors)
    source = CheckpointFiles(files, quantization, prefix, excluded=() if read_modules else modules)
    config = dataclasses.replace(
        config, param_dtype=dtype, compute_dtype=dtype, n_mtp_modules=len(modules) if read_modules else 0
    )
    return load_tensors(source, ModelDef(config), mesh, folder.name)


def load_tensors(source: TensorSource, definition: ModelDef, mesh: Mesh | None, name: str) -> Loaded:
    """Loads the tensors of a source, by their Hugging Face names, onto a mesh, layer by layer.

    Args:
      source: reads one tensor at a time, from several threads.
      mesh: None puts everything on the first device of this process.
      name: where the tensors come from, for the progress.

    Raises:
      UserError: tensors that do not fit the definition; a mesh that does not divide the weights.
    """
    config = definition.config
    shardings: Mapping[str, Sharding]
    if mesh is None:
        shardings = dict.fromkeys(leaf_shapes(config), SingleDeviceSharding(jax.local_devices()[0]))
    else:
        params, bias = definition.shardings(mesh)
        shardings = flatten_tree(params) | flatten_tree(bias)
    table = match_layouts(source, config)
    tensors_of = group_by_leaf(table)
    shapes = leaf_shapes(config)
    size = sum(source.sizes[tensor] for tensors in tensors_of.values() for tensor, _ in tensors)
    with (
        Progress(size, "byte", f"load {name}") as progress,
        ThreadPoolExecutor(min(os.cpu_count() or 1, _THREADS)) as threads,
    ):
        reader = _TensorReader(source, threads, progress)
        arrays = {
            leaf: reader.leaf(leaf, tensors, shapes[leaf], shardings[leaf]) for leaf, tensors in tensors_of.items()
        }
        for leaf in absent_leaves(config, table):
            arrays[leaf] = _zeros(shapes[leaf], shardings[leaf])
    return Loaded(definition, *unflatten_leaves(arrays))


@functools.lru_cache(maxsize=256)
def _zeros_program(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def _zeros(shape: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
    return _zeros_program(shape.shape, shape.dtype, sharding)()


@functools.lru_cache(maxsize=256)
def _write_program(sharding: Sharding) -> Callable[[jax.Array, jax.Array, np.int32], jax.Array]:
    """Writes a layer into a stack, which it donates. Kept, so that leaves and checkpoints of equal shapes share it."""
    return jax.jit(
        lambda whole, layer, index: jax.lax.dynamic_update_index_in_dim(whole, layer, index, 0),
        donate_argnums=0,
        out_shardings=sharding,
    )


@dataclasses.dataclass(frozen=True)
class _TensorReader:
    source: TensorSource
    threads: ThreadPoolExecutor
    progress: Progress

    def leaf(self, leaf: str, tensors: _Tensors, shape: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
        """Reads one leaf onto its devices; a stack of layers is written layer by layer into one donated array."""
        if not tensors[0][1].index:
            return self._array(leaf, tensors, 0, shape.shape, shape.dtype, sharding)
        whole = _zeros(shape, sharding)
        write = _write_program(sharding)
        # The axis of layers is never sharded: the first entry of the spec is None.
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
        for index in range(shape.shape[0]):
            in_layer = [(name, tensor) for name, tensor in tensors if tensor.index[0] == index]
            layer = self._array(leaf, in_layer, 1, shape.shape[1:], shape.dtype, sharding)
            whole = write(whole, layer, np.int32(index))
        return whole

    def _array(self, leaf: str, tensors: _Tensors, depth: int, shape, dtype, sharding: Sharding) -> jax.Array:
        """Reads the regions of one array that the devices of this process hold, each once.

        depth: number of the tensors' leading indices that select the array.
        """
        regions = {
            device: tuple(part.indices(size)[:2] for part, size in zip(region or (), shape, strict=True))
            for device, region in sharding.addressable_devices_indices_map(shape).items()
        }
        buffers = {region: np.empty([stop - start for start, stop in region], dtype) for region in regions.values()}

        def fill(item: tuple[str, TensorLayout]) -> int:
            name, tensor = item
            index = tensor.index[depth:]
            local = [region for region in buffers if all(a <= i < b for i, (a, b) in zip(index, region, strict=False))]
            if local:
                values = tensor.slice_leaf(self.source.read(name), leaf)
                for region in local:
                    offset = tuple(i - start for i, (start, _) in zip(index, region, strict=False))
                    rest = tuple(slice(*part) for part in region[len(index) :])
                    copy_into(buffers[region][offset], values[rest])
            return self.source.sizes[name]

        for count in self.threads.map(fill, tensors):
            self.progress.update(count)
        shards = [jax.device_put(buffers[region], device) for device, region in regions.items()]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)
