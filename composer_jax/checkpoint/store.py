"""Checkpoints: named pytrees of arrays and one JSON record per step, on Orbax.

A step is one folder `DIR/STEP/` with one Orbax item per named pytree, so that RL can restore the parameters of a
pretraining run without its optimizer state, and one item `meta` with the JSON values and an index of every leaf's shape
and dtype. Orbax writes to a temporary folder and renames it: a step exists whole or not at all. It writes in threads,
from a copy in host memory, while the caller trains on. A pytree is stored flat, as {path of the leaf: array}; `like`
gives its structure at restore, so NamedTuples, optax states and NNX states need no registration, and renaming a
container class breaks no checkpoint.
"""

import json as json_module
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils.epath import backend as epath_backend

from composer_jax.errors import UserError
from composer_jax.parallel.processes import broadcast_from_process0
from composer_jax.storage.bucket import BucketFolder, is_url

PyTree = Any

_META = "meta"
_FORMAT = 1
_SHOWN = 4  # mismatches listed in one error
_CLIENTS = ("aiohttp", "gcsfs", "google", "requests")
"""Packages whose exceptions mean that a bucket cannot be reached."""
_OS_ERROR = re.compile(r"([^:\s][^:]*?) \[os_error_code=")
_WRITE_TIMEOUT_S = 7 * 24 * 3600
"""Seconds that Orbax's threads may take to write one step, waiting for other processes included."""


class CheckpointStore:
    """The checkpoints of one run.

    directory: a local folder, or any path Orbax can write (gs://...). Created by the first save.
    keep: number of latest steps that stay on disk; None keeps all.
    notes: plain JSON stored with every step, such as the configuration of the network, so that a checkpoint describes
      itself (`read_notes`).
    before_save: called before a step is written, such as Workdir.publish: the step then relies only on files that are
      safe.

    Several processes make the same calls on a shared folder, and Orbax lets each write its own shards. Process 0 lists
    the steps for all, because the file systems of two hosts can show a new step at different times.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int | None = None,
        *,
        notes: Mapping[str, Any] | None = None,
        before_save: Callable[[], None] | None = None,
    ):
        if keep is not None and keep < 1:
            raise UserError(f"keep={keep} must be at least 1; use keep=None to keep all steps")
        # Orbax logs a traceback in each of its threads, and the caller gets the same error as an exception.
        logging.getLogger("absl").addFilter(_is_not_from_orbax)
        self.directory = directory if is_url(directory) else Path(directory).absolute()
        self._keep = keep
        self._notes = dict(notes or {})
        self._before_save = before_save
        self._writing = False
        self._manager_if_open: ocp.CheckpointManager | None = None
        self._saving_thread: threading.Thread | None = None

    # ---------------------------------------------------------------- writing

    def save(self, step: int, *, arrays: Mapping[str, PyTree], json: Mapping[str, Any] | None = None) -> None:
        """Copies one step to host memory and begins to write it, atomically: a killed process leaves nothing of it.

        The arrays can be donated when it returns. Threads write the copy while the caller goes on; at most one step is
        being written: the next `save` waits for it, as `wait`, `close` and all methods that read steps do. The copy
        takes host memory until the step is complete: (bytes of the arrays) / (number of processes) in each process, for
        arrays that divide over the processes. Another array is copied whole by one of them.

        arrays: name -> pytree of jax or numpy arrays (any dtype, bfloat16 included; an empty tree is fine).
        json: name -> plain JSON value (counters, the state of a data iterator, RNG seeds).

        Raises:
          UserError: the step exists, or this step or the one before cannot be written. What goes wrong after the return
            is raised by the next method that waits.
          TypeError: a leaf is not an array, or a JSON value is not plain JSON.
        """
        if _META in arrays:
            raise ValueError(f"{_META!r} names the store's own item; give the pytree another name")
        flat = {name: _flatten(name, tree) for name, tree in arrays.items()}
        index = {name: {path: _signature(x) for path, x in leaves.items()} for name, leaves in flat.items()}
        meta = {"format": _FORMAT, "notes": self._notes, "arrays": index, "json": dict(json or {})}
        json_module.dumps(meta)  # raises a TypeError that names the type, before anything is written

        self.wait()
        manager = self._manager(writing=True)
        if step in manager.all_steps():
            raise UserError(f"step {step} is already saved in {self.directory}; use a new step number")
        if self._before_save is not None:
            self._before_save()
        _register(self._registry, flat)
        items: dict[str, ocp.args.CheckpointArgs] = {
            name: ocp.args.PyTreeSave({path: _copy_of_pinned(leaf) for path, leaf in leaves.items()})
            for name, leaves in flat.items()
            if leaves
        }
        items[_META] = ocp.args.JsonSave(meta)
        self._saving_thread = threading.current_thread()
        try:
            manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            self._raise_write_error(error)

    def wait(self) -> None:
        """Returns when the step that is being written is complete. Raises UserError if it cannot be written."""
        if self._manager_if_open is None or not self._writing:
            return
        try:
            self._manager_if_open.wait_until_finished()
        except Exception as error:
            self._raise_write_error(error)

    def close(self) -> None:
        """Waits until the last step is complete, and releases the folder. Raises as `wait` does."""
        self.wait()
        if self._manager_if_open is not None:
            self._manager_if_open.close()
            self._manager_if_open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- reading

    def steps(self) -> list[int]:
        """Returns the complete steps on disk, ascending, including those that other programs wrote meanwhile."""
        self.wait()
        manager = self._manager()
        if is_url(self.directory):
            # gcsfs remembers listings until this process changes them; this is the file system that Orbax lists with.
            epath_backend.fsspec_backend.fs(str(self.directory)).invalidate_cache()
        manager.reload()
        return broadcast_from_process0(lambda: sorted(manager.all_steps()))

    def latest_step(self) -> int | None:
        """Returns the last complete step, or None."""
        return max(self.steps(), default=None)

    def restore(
        self, step: int | None = None, *, like: Mapping[str, PyTree]
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        """Reads one step, bit for bit, onto the shardings of `like`.

        step: None is the latest.
        like: name -> pytree of the structure to restore. A leaf is a jax.ShapeDtypeStruct or a jax.Array, whose
          sharding (on any mesh, not only the one that saved) the result has; without a sharding, and for an
          uncommitted array, the result is uncommitted. A NumPy leaf gives NumPy. Items of the checkpoint that are not
          named here are not read.

        Returns:
          ({name: pytree}, the JSON values of the step).

        Raises:
          UserError: there is no such step or item; a leaf is missing, unexpected, or of another shape or dtype; or the
            files are damaged.
        """
        step = self._find_step(step)
        meta = self._read_meta(step)
        index = meta["arrays"]
        flat = {name: _flatten(name, tree) for name, tree in like.items()}
        for name, leaves in flat.items():
            self._require_fit(step, name, leaves, index)

        items = {name: _restore_args(leaves) for name, leaves in flat.items() if leaves}
        restored: Mapping[str, Any] = {}
        if items:
            _register(self._registry, items)
            try:
                restored = self._manager().restore(step, args=ocp.args.Composite(**items))
            except Exception as error:
                raise self._read_error(step, error) from error
        out = {}
        for name, tree in like.items():
            leaves = [_to_device(restored[name][path], leaf) for path, leaf in flat[name].items()]
            out[name] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        return out, meta["json"]

    def read_json(self, step: int | None = None) -> dict[str, Any]:
        """Returns the JSON values of a step, the latest by default, without its arrays. Raises like `restore`."""
        return self._read_meta(self._find_step(step))["json"]

    def restore_to_host(self, step: int | None = None) -> dict[str, dict[str, np.ndarray]]:
        """Reads all arrays of one step into host memory, as item -> {path of a leaf: array}; `save` takes them again.

        Raises like `restore`.
        """
        step = self._find_step(step)
        index = self._read_meta(step)["arrays"]
        like = {
            name: {path: np.empty(shape, np.dtype(dtype)) for path, (shape, dtype) in leaves.items()}
            for name, leaves in index.items()
        }
        return self.restore(step, like=like)[0]

    def read_notes(self) -> dict[str, Any]:
        """Returns the notes of the store that wrote the latest step. Raises like `restore`."""
        return self._read_meta(self._find_step(None))["notes"]

    # ---------------------------------------------------------------- inside

    def _manager(self, *, writing: bool = False) -> ocp.CheckpointManager:
        """Opens the Orbax manager. A writer removes the temporary folder of a killed save, a reader never does."""
        if self._manager_if_open is not None and (self._writing or not writing):
            return self._manager_if_open
        if self._manager_if_open is not None:
            self._manager_if_open.close()
        if writing and is_url(self.directory):
            # A sentence, before threads begin to write: TensorStore repeats requests that are not answered for a
            # quarter of an hour, and the process does not end before its threads do.
            BucketFolder(str(self.directory)).names()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            create=writing,
            cleanup_tmp_directories=writing,
            enable_async_checkpointing=writing,
            # Otherwise the threads that write wait for minutes for folders that cannot be created.
            async_options=ocp.AsyncOptions(
                timeout_secs=_WRITE_TIMEOUT_S,
                barrier_sync_fn=self._wait_at_barrier,
                create_directories_asynchronously=False,
            ),
            save_root_metadata=False,
        )
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add(_META, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
        registry.add(_META, ocp.args.JsonRestore, ocp.JsonCheckpointHandler())
        self._registry = registry
        self._manager_if_open = ocp.CheckpointManager(self.directory, options=options, handler_registry=registry)
        self._writing = writing
        return self._manager_if_open

    def _wait_at_barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits for the other processes, unless the write of this one has failed: raises its error at once.

        Orbax meets the other processes after a failed write, too. They wait for that write, so its error would come
        when their time is over.
        """
        error = sys.exception()
        # The caller of `save` may be handling an error of its own, such as an interrupt; Orbax's threads are not.
        if error is not None and threading.current_thread() is not self._saving_thread:
            raise error
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _read_meta(self, step: int) -> dict[str, Any]:
        try:
            args = ocp.args.Composite(**{_META: ocp.args.JsonRestore()})
            meta = self._manager().restore(step, args=args)[_META]
            return {"notes": {}, "arrays": meta["arrays"], "json": meta["json"]} | meta
        except Exception as error:  # from Orbax, the file system or the parser of a damaged file
            raise self._read_error(step, error) from error

    def _find_step(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise UserError(f"there is no checkpoint in {self.directory}; run the stage that writes it first")
        if step is None:
            return steps[-1]
        if step not in steps:
            shown = ", ".join(map(str, steps[-8:]))
            raise UserError(f"there is no step {step} in {self.directory}; the steps there are {shown}")
        return step

    def _require_fit(self, step: int, name: str, leaves: Mapping[str, Any], index: Mapping[str, Any]) -> None:
        """Raises a UserError that names what differs between the stored item and `like`."""
        where = f"checkpoint step {step} in {self.directory}"
        if name not in index:
            raise UserError(f"{where} has no item {name!r}; it has {', '.join(sorted(index)) or 'none'}")
        stored = index[name]
        problems = [f"{path} is missing from the checkpoint" for path in leaves if path not in stored]
        problems += [f"{path} is in the checkpoint only" for path in stored if path not in leaves]
        for path, leaf in leaves.items():
            if path in stored and stored[path] != _signature(leaf):
                problems.append(f"{path} is {_show(stored[path])} there and {_show(_signature(leaf))} here")
        if problems:
            more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise UserError(
                f"{name!r} of {where} does not fit: {'; '.join(problems[:_SHOWN])}{more}. "
                "Use the config that wrote the checkpoint, or start from another one"
            )

    def _raise_write_error(self, error: Exception) -> NoReturn:
        """Raises what a failed save becomes: a UserError if disk or bucket are the cause, else the error itself."""
        # Orbax raises the error of a save once in each thread. A new manager has none, and removes what is left of it.
        self._manager_if_open = None
        # The array writer reports an error of the operating system as a ValueError with its message and code.
        os_error = _OS_ERROR.search(str(error))
        remote = is_url(self.directory) and (
            str(self.directory) in str(error) or type(error).__module__.partition(".")[0] in _CLIENTS
        )
        if not isinstance(error, OSError) and not os_error and not remote:
            raise error
        reason = os_error.group(1) if os_error else getattr(error, "strerror", None) or str(error)
        reason = (reason.strip() or type(error).__name__).splitlines()[0][:200]
        advice = "" if is_url(self.directory) else "free some space (or raise the limit) and "
        if isinstance(error, TimeoutError) and error.errno is None:  # of Orbax, not of the operating system
            reason, advice = f"it was not complete after {_WRITE_TIMEOUT_S} s", "write to faster storage and "
            if "barrier" in str(error):
                reason, advice = "another process did not complete its part", ""
        raise UserError(
            f"cannot write a checkpoint to {self.directory}: {reason}; the steps saved before are "
            f"intact; {advice}run the same command again"
        ) from error

    def _read_error(self, step: int, error: Exception) -> UserError:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        earlier = [other for other in self._manager().all_steps() if other < step]
        problem = f"checkpoint step {step} in {self.directory} cannot be read ({reason})"
        folder = f"{self.directory}/{step}"
        if earlier:
            return UserError(
                f"{problem}; if its files are damaged, delete {folder} and run the same command again, which falls "
                f"back on step {max(earlier)}"
            )
        return UserError(
            f"{problem} and no earlier step is kept; if its files are damaged, delete {folder} to start over"
        )


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in Path(record.pathname).parts


def _copy_of_pinned(leaf: Any) -> Any:
    """Returns a copy of an array in pinned host memory, and any other leaf itself.

    Orbax writes such an array from its own buffer, which XLA's GPU client refuses to donate meanwhile ("Donation
    requested for buffer with external reference").
    """
    if not isinstance(leaf, jax.Array) or leaf.sharding.memory_kind != "pinned_host":
        return leaf
    shards = [shard.data for shard in leaf.addressable_shards]
    copies = jax.device_put(shards, [shard.sharding for shard in shards], may_alias=False)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, copies)


def _register(registry: ocp.handlers.CheckpointHandlerRegistry, names: Iterable[str]) -> None:
    """Registers a handler for every item, because the callers choose the names."""
    for name in names:
        if registry.has(name, ocp.args.PyTreeSave):
            continue
        # The fastest of Orbax's formats to write: 12 MB in 85 leaves take 240 ms, and 290 ms in its default.
        # Compression would take 15 % longer and save 7 % of the space of float32 weights.
        handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
        registry.add(name, ocp.args.PyTreeSave, handler)
        registry.add(name, ocp.args.PyTreeRestore, handler)


def _flatten(name: str, tree: PyTree) -> dict[str, Any]:
    """Returns {path of a leaf: leaf}, in the order of jax.tree.leaves; a path is like 'layers.0.w_gate'."""
    flat: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator=".") or "value"
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
            kind = type(leaf).__name__
            raise TypeError(f"{name}.{path} is a {kind}; checkpoints hold arrays; pass other values in json")
        if path in flat:
            raise ValueError(f"two leaves of {name!r} have the path {path!r}; rename one of the keys")
        flat[path] = leaf
    return flat


def _signature(leaf: Any) -> list[Any]:
    """Returns [shape, dtype] as JSON."""
    return [list(leaf.shape), np.dtype(leaf.dtype).name]


def _show(signature: list[Any]) -> str:
    shape, dtype = signature
    return f"{dtype}[{','.join(map(str, shape))}]"


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Returns the sharding of the restored leaf; None restores it to host memory, uncommitted."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return getattr(leaf, "sharding", None)


def _restore_args(leaves: Mapping[str, Any]) -> ocp.args.PyTreeRestore:
    args = {}
    for path, leaf in leaves.items():
        sharding = _sharding(leaf)
        if sharding is None:
            args[path] = ocp.RestoreArgs(restore_type=np.ndarray)
        else:
            try:
                sharding.shard_shape(leaf.shape)
            except ValueError as error:
                raise UserError(f"{path} {_show(_signature(leaf))} cannot be sharded so: {error}") from error
            args[path] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)
    item = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
    return ocp.args.PyTreeRestore(item, restore_args=args)


def _to_device(value: Any, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic) or _sharding(leaf) is not None:
        return value
    return jax.numpy.asarray(value)
