"""Versions of weights in a folder or a bucket: from time to time all of them, and patches between (weight_patch.py).

    version-00000012/
        shards-00000.json    what process 0 of the learner holds: names, places, hashes and where the bytes are
        shards-00000.patch   its patches from version 11; missing if `base` is null
        shards-00000.full    its whole arrays; missing between two anchors
        manifest.json        written last: {"version", "base", "processes", "has_full"}, and labels of the publisher
    pins.json            versions that are not deleted (pinned_versions.py)

A version without a manifest does not exist. A receiver that has the version before takes the patches; every other one,
and one whose patches are damaged or gone, begins with the last version that is there in full.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import zstandard

from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.folder import Folder
from composer_jax.checkpoint.weight_parts import Box, bytes_digest, changes_within, overlap
from composer_jax.checkpoint.weight_patch import (
    LEVEL,
    BadPatch,
    ElementChanges,
    apply_changes,
    decode_changes,
    digest,
    encode_changes,
    find_changes,
)
from composer_jax.errors import UserError

ANCHOR_EVERY = 10
"""Versions from one that is written in full to the next."""
KEPT_ANCHORS = 2
"""Versions in full that stay, with all patches since the older one."""
PINS = "pins.json"
ARMS = "arms.json"
"""Beside the versions: {"anchor": VERSION, "candidate": VERSION}, what the servers of a release's arms serve."""
THREADS = os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a named array that one process holds."""

    name: str
    start: tuple[int, ...]
    """Its first element in the whole array."""
    whole_shape: tuple[int, ...]


Shards = Mapping[Shard, np.ndarray]
Parts = Mapping[Shard, tuple[int, ...]]
"""Shapes of shards."""


@dataclasses.dataclass(frozen=True)
class Published:
    """What a version weighs."""

    version: int
    elements: int
    changed: int
    """Elements that differ from the version before; all of them in a first version."""
    patch_bytes: int
    """0 without a patch."""
    full_bytes: int
    """0 between two anchors."""


class MissingVersion(UserError):
    """A folder does not have the version that was asked for, perhaps not yet."""


class WeightPublisher:
    """Writes versions. Each process of the learner has one, with the shards that it holds."""

    def __init__(
        self,
        folder: str,
        *,
        anchor_every: int = ANCHOR_EVERY,
        process: int = 0,
        processes: int = 1,
        barrier: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
          folder: a local folder or a URL that fsspec knows.
          barrier: waits until all processes have called it.
        """
        if anchor_every < 1:
            raise UserError(f"anchor_every={anchor_every} is below 1; use 1 to write every version in full.")
        self._files = ChainFiles(folder)
        self._anchor_every, self._process, self._processes, self._barrier = anchor_every, process, processes, barrier
        self._base: int | None = None
        self._last: dict[Shard, np.ndarray] = {}
        self._since_anchor = 0

    def publish(self, shards: Shards, version: int, labels: Mapping[str, Any] | None = None) -> Published:
        """Writes a version; all processes call it alike. The arrays are kept, and must not change afterwards.

        After a restart the first version is written in full, since nobody knows what the one before held, and those
        from it on that the folder has are deleted: the run makes them again. None of them may be pinned, but for the
        first one, which then stays as it is and must have these weights.

        labels: stand in the manifest, such as {"restores": 12}.

        Raises:
          UserError: the version is not above the one before, somebody else has published since, those that would be
            deleted are pinned, a pinned one has other weights, or the folder cannot be written.
        """
        is_there = self._base is None and self._restart_at(version, shards)
        if self._base is not None:
            self._check_next(version, shards, self._base)
        self._barrier()
        elements = sum(array.size for array in shards.values())
        if is_there:
            self._base, self._last = version, dict(shards)
            return Published(version, elements, elements, 0, 0)
        has_full = self._base is None or self._since_anchor + 1 >= self._anchor_every
        entries, patches, fulls = [], [], []
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            for shard, (entry, patch, full) in zip(
                shards, pool.map(lambda s: self._encode(s, shards[s], has_full), shards), strict=True
            ):
                entries.append(dataclasses.asdict(shard) | entry)
                patches.append(patch)
                fulls.append(full)
        contents = {"patch": b"".join(patches)} if self._base is not None else {}
        contents |= {"full": b"".join(fulls)} if has_full else {}
        contents["json"] = json.dumps(entries).encode()
        manifest = {"version": version, "base": self._base, "processes": self._processes, "has_full": has_full}
        with self._deleting_on_error(version):
            for kind, content in contents.items():
                self._files.write(f"{self._stem(version)}.{kind}", content)
            self._barrier()
            if self._process == 0:
                content = json.dumps({**(labels or {}), **manifest}).encode()
                self._files.write(posixpath.join(version_folder(version), "manifest.json"), content)
        if self._process == 0:
            self._delete_old()
        self._since_anchor = 0 if has_full else self._since_anchor + 1
        self._base, self._last = version, dict(shards)
        return Published(
            version,
            elements,
            sum(entry["changed"] for entry in entries),
            sum(map(len, patches)),
            sum(map(len, fulls)),
        )

    def _stem(self, version: int) -> str:
        return posixpath.join(version_folder(version), f"shards-{self._process:05d}")

    @contextlib.contextmanager
    def _deleting_on_error(self, version: int) -> Iterator[None]:
        """Deletes what this process has written of a version that cannot be written as a whole, as in a full folder."""
        try:
            yield
        except (UserError, OSError) as error:
            for kind in ("patch", "full", "json"):
                self._files.delete(f"{self._stem(version)}.{kind}")
            reason = str(error) if isinstance(error, UserError) else f"{error}; free some space"
            raise UserError(
                f"version {version} of the weights was not published, and those before it stay: {reason}."
            ) from error

    def _encode(self, shard: Shard, array: np.ndarray, has_full: bool) -> tuple[dict[str, Any], bytes, bytes]:
        changed, patch, full = array.size, b"", b""
        if self._base is not None:
            changes = find_changes(self._last[shard], array)
            changed, patch = len(changes.places), encode_changes(changes)
        if has_full:
            full = zstandard.ZstdCompressor(level=LEVEL).compress(array.tobytes())
        entry = {
            "shape": array.shape,
            "dtype": array.dtype.name,
            "changed": changed,
            "sha256": digest(array),
            "patch_sha256": bytes_digest(patch),
            "patch_bytes": len(patch),
            "full_bytes": len(full),
        }
        return entry, patch, full

    def _check_next(self, version: int, shards: Shards, base: int) -> None:
        """Raises a UserError unless this version can follow `base`, the last one that this publisher wrote."""
        if version <= base:
            raise UserError(f"version {version} cannot follow version {base}; versions rise.")
        if {s: a.shape for s, a in self._last.items()} != {s: a.shape for s, a in shards.items()}:
            raise UserError(f"version {version} has other arrays than version {base}; publish into another folder.")
        if (newest := max(self._files.versions(), default=base)) > base:
            raise UserError(
                f"version {version} cannot follow version {base}: somebody else has published version {newest} of "
                f"{self._files.url}, as a rollback does; start the trainer again from the weights that serve now."
            )

    def _restart_at(self, version: int, shards: Shards) -> bool:
        """Deletes this version and those above it; one that is pinned stays, and True is returned."""
        versions, pins = self._files.versions(), self._files.pins()
        if pinned := sorted(pin for pin in pins & versions if pin > version):
            raise UserError(
                f"version {version} would replace version {pinned[0]} of {self._files.url}, which is pinned; go on "
                f"from weights of version {pinned[-1]} or later, or publish into another folder."
            )
        is_there = version in pins & versions
        if is_there:
            self._check_weights(version, shards)
        self._barrier()  # nothing is deleted before all processes have checked their shards
        if self._process == 0:
            for later in versions:
                if later > version or (later == version and not is_there):
                    self._files.delete_version(later)
        return is_there

    def _check_weights(self, version: int, shards: Shards) -> None:
        """Raises a UserError unless a version has the weights of these shards, however it is cut."""
        receiver = WeightReceiver(self._files.url, {shard: array.shape for shard, array in shards.items()})
        is_pinned = f"version {version} of {self._files.url} is pinned and has other weights"
        try:
            receiver.receive(version)
        except UserError as error:
            raise UserError(f"{is_pinned} ({error}); publish into another folder.") from error
        for shard, array in shards.items():
            if digest(receiver.parts[shard]) != digest(array):
                raise UserError(f"{is_pinned} ({shard.name}); publish into another folder.")

    def _delete_old(self) -> None:
        """Deletes versions that no receiver needs and nobody has pinned."""
        manifests, pins = self._files.manifests(), self._files.pins()
        anchors = sorted(v for v, manifest in manifests.items() if manifest["has_full"] and v not in pins)
        for version in manifests.keys() - pins:
            if len(anchors) >= KEPT_ANCHORS and version < anchors[-KEPT_ANCHORS]:
                self._files.delete_version(version)


class WeightReceiver:
    """The newest weights of a folder, in arrays that are changed in place.

    It holds whole arrays, or the parts that the devices of one process hold, however the learner has cut them. Beside
    them it needs memory for one published shard, and for the bytes of one version's patches of its parts, which undo
    what has changed if a later patch is damaged.
    """

    def __init__(self, folder: str, parts: Parts | None = None) -> None:
        """parts: what it holds (weight_shards.parts_here); None: every published array, whole."""
        self._files, self._wanted = ChainFiles(folder), parts
        self.version = -1
        """Of `parts`; -1 before the first, or after one that could not be read to its end."""
        self.parts: dict[Shard, np.ndarray] = {}
        self.changed: set[str] = set()
        """Names of the arrays that `receive` has changed since the caller cleared this set."""
        self._by_name: dict[str, list[tuple[Box, np.ndarray]]] = {}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Whole arrays by name, of a receiver without `parts`."""
        assert self._wanted is None, "this receiver holds parts of arrays"
        return {shard.name: array for shard, array in self.parts.items()}

    def receive(self, version: int | None = None) -> int:
        """Brings `parts` to a version, the newest by default; returns it.

        Raises:
          MissingVersion: the folder does not have the version.
          UserError: it is that of another network, or cannot be built from what is in the folder.

        `parts` then keep the version that they had, unless files change or vanish between two reads.
        """
        manifests = self._files.manifests()
        target = max(manifests, default=None) if version is None else version
        if target not in manifests:
            available = f"versions {min(manifests)} to {max(manifests)}" if manifests else "no version"
            raise MissingVersion(
                f"{self._files.url} has {available} of the weights, not {'any' if target is None else target}; wait "
                "until the trainer has published it, or take one that is there."
            )
        chain = _chain(manifests, self.version, target)
        if chain is not None:
            with contextlib.suppress(BadPatch):
                self._apply(chain)
                return target
        self._load(manifests, target)
        return target

    def _apply(self, chain: list[int]) -> None:
        """Applies patches in order. If one is damaged, it is undone, and those before it stay."""
        for version in chain:
            undo: list[tuple[np.ndarray, bytes]] = []
            try:
                for entry, data in self._files.read_shards(version, "patch", self._takes_patch):
                    self._change(version, entry, data, undo)
            except BadPatch:
                for array, data in reversed(undo):
                    apply_changes(array, decode_changes(data, array.dtype, array.size))
                raise
            self.version = version

    def _change(
        self, version: int, entry: Mapping[str, Any], data: bytes, undo: list[tuple[np.ndarray, bytes]]
    ) -> None:
        """Applies the patch of a published shard, and appends what undoes it to `undo`. Raises BadPatch."""
        changes, shard = self._read_patch(entry, data), _box(entry)
        for box, array in self._by_name[entry["name"]]:
            undone = apply_changes(array, changes_within(changes, shard, box))
            if len(undone.places):
                self.changed.add(entry["name"])
                undo.append((array, encode_changes(undone)))
            if box.contains(shard):
                place = overlap(shard, box)
                assert place is not None, "the box contains the shard"
                if digest(np.ascontiguousarray(array[*place, ...])) != entry["sha256"]:
                    raise BadPatch(f"{entry['name']} of version {version} has another hash after the patch")

    def _read_patch(self, entry: Mapping[str, Any], data: bytes) -> ElementChanges:
        if "patch_sha256" in entry and bytes_digest(data) != entry["patch_sha256"]:
            raise BadPatch(f"the patch of {entry['name']} has another hash than its version says")
        boxes, shard = self._by_name.get(entry["name"]), _box(entry)
        if boxes is None:
            raise BadPatch(f"{entry['name']} is new")
        if "patch_sha256" not in entry and not all(box.contains(shard) for box, _ in boxes):
            raise BadPatch(f"the patch of {entry['name']} has no hash, which a part of the array needs")
        return decode_changes(data, np.dtype(entry["dtype"]), math.prod(entry["shape"]))

    def _load(self, manifests: Mapping[int, Any], target: int) -> None:
        """Reads the last version in full before `target`, and the patches from there, into the arrays that exist."""
        problem, had_version = "no version before it is there in full", self.version >= 0
        for anchor in sorted((v for v in manifests if v <= target and manifests[v]["has_full"]), reverse=True):
            chain = [] if anchor == target else _chain(manifests, anchor, target)
            if chain is None:
                continue
            try:
                wanted = self._wanted_of(anchor)
                if had_version:  # which must stay if this one cannot be read
                    self._verify(anchor, chain)
                self._fill(anchor, wanted)
                self._apply(chain)
            except BadPatch as error:
                problem = str(error)
                if not had_version:
                    self.version = -1
                continue
            return
        raise UserError(f"version {target} of the weights in {self._files.url} cannot be built: {problem}.")

    def _verify(self, anchor: int, chain: list[int]) -> None:
        """Reads a version in full and the patches after it, one shard after another, and keeps none of them."""
        for entry, data in self._files.read_shards(anchor, "full", self._takes):
            _decompress(entry, data)
        for version in chain:
            for entry, data in self._files.read_shards(version, "patch", self._takes_patch):
                self._read_patch(entry, data)

    def _wanted_of(self, version: int) -> dict[Shard, tuple[tuple[int, ...], np.dtype]]:
        """Returns shape and dtype of the arrays that hold a version here. Raises UserError for another network."""
        entries = {entry["name"]: entry for entry in self._files.entries(version)}
        if self._wanted is None:
            shapes = {name: tuple(entry["whole_shape"]) for name, entry in entries.items()}
            parts = {Shard(name, (0,) * len(shape), shape): shape for name, shape in shapes.items()}
        else:
            parts = self._wanted
            for shard in parts:
                published = tuple(entries[shard.name]["whole_shape"]) if shard.name in entries else None
                if published != shard.whole_shape:
                    raise other_network(shard.name, published, shard.whole_shape)
        return {shard: (shape, np.dtype(entries[shard.name]["dtype"])) for shard, shape in parts.items()}

    def _fill(self, anchor: int, wanted: Mapping[Shard, tuple[tuple[int, ...], np.dtype]]) -> None:
        """Reads a version in full, one published shard after another."""
        self.version = -1
        for shard, (_, dtype) in wanted.items():
            if shard in self.parts and self.parts[shard].dtype != dtype:
                del self.parts[shard]
        self.parts = {
            shard: self.parts.pop(shard) if shard in self.parts else np.empty(shape, dtype)
            for shard, (shape, dtype) in wanted.items()
        }
        self._by_name = {}
        for shard, array in self.parts.items():
            self._by_name.setdefault(shard.name, []).append((Box(shard.start, array.shape), array))
        n_filled: collections.Counter[str] = collections.Counter()
        for entry, data in self._files.read_shards(anchor, "full", self._takes):
            content, shard = _decompress(entry, data), _box(entry)
            for box, array in self._by_name[entry["name"]]:
                here, there = overlap(shard, box), overlap(box, shard)
                if here is not None and there is not None:
                    array[*here, ...] = content[*there, ...]
                    n_filled[entry["name"]] += content[*there, ...].size
            self.changed.add(entry["name"])
        for name, boxes in self._by_name.items():
            if n_filled[name] != sum(array.size for _, array in boxes):
                raise BadPatch(f"version {anchor} has only a part of {name}")
        self.version = anchor

    def _takes(self, entry: Mapping[str, Any]) -> bool:
        """Whether some of a published shard is held here."""
        if self._wanted is None:
            return True
        box = _box(entry)
        return any(overlap(box, mine) is not None for mine in self._boxes.get(entry["name"], ()))

    def _takes_patch(self, entry: Mapping[str, Any]) -> bool:
        return entry.get("changed") != 0 and self._takes(entry)

    @functools.cached_property
    def _boxes(self) -> dict[str, list[Box]]:
        boxes: dict[str, list[Box]] = {}
        for shard, shape in (self._wanted or {}).items():
            boxes.setdefault(shard.name, []).append(Box(shard.start, tuple(shape)))
        return boxes


def other_network(name: str, shape: tuple[int, ...] | None, expected: tuple[int, ...]) -> UserError:
    """Returns the error for an array that a version lacks (shape=None), or has in another shape."""
    other = "is missing" if shape is None else f"has the shape {shape}, not {expected}"
    return UserError(f"the weights that were received are those of another network: {name} {other}.")


def _box(entry: Mapping[str, Any]) -> Box:
    return Box(tuple(entry["start"]), tuple(entry["shape"]))


def _decompress(entry: Mapping[str, Any], data: bytes) -> np.ndarray:
    """Returns a published shard from its bytes in full. Raises BadPatch unless it has its hash."""
    dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
    try:
        content = zstandard.ZstdDecompressor().decompress(data, max_output_size=math.prod(shape) * dtype.itemsize)
        array = np.frombuffer(content, dtype).reshape(shape)
    except (zstandard.ZstdError, ValueError) as error:
        raise BadPatch(f"{entry['name']} cannot be decompressed ({error})") from error
    if digest(array) != entry["sha256"]:
        raise BadPatch(f"{entry['name']} has another hash than its version says")
    return array


def _chain(manifests: Mapping[int, Any], start: int, target: int) -> list[int] | None:
    """Returns the versions whose patches lead from `start` to `target`, or None if some are missing."""
    chain: list[int] = []
    version: int | None = target
    while version != start:
        if version is None or version < start or version not in manifests:
            return None
        chain.append(version)
        version = manifests[version]["base"]
    return chain[::-1]


def version_folder(version: int) -> str:
    return f"version-{version:08d}"


def array_part(array: np.ndarray, start: Iterable[int], shape: Iterable[int]) -> np.ndarray:
    """Returns a copy of a part of an array, in C order."""
    place = tuple(slice(i, i + n) for i, n in zip(start, shape, strict=True))
    return np.array(array[*place, ...], order="C")


class ChainFiles:
    """The files of a folder of versions."""

    def __init__(self, url: str) -> None:
        folder = Folder(url)
        self.url, self._system, self._root, self._is_local = folder.name, folder.fs, folder.root, folder.local

    def versions(self, *, is_complete: bool = True) -> set[int]:
        """Returns the versions, by the names of their files alone; is_complete=False adds those without a manifest."""
        self._system.invalidate_cache()
        paths = self._system.glob(f"{self._root}/version-*{'/manifest.json' if is_complete else ''}")
        matches = (re.search(r"version-(\d+)(/manifest\.json)?/?$", path) for path in paths)
        return {int(match[1]) for match in matches if match}

    def manifests(self) -> dict[int, Any]:
        """Returns the manifest of each version."""
        self._system.invalidate_cache()
        found = {}
        for path in self._system.glob(f"{self._root}/version-*/manifest.json"):
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # deleted meanwhile
                manifest = json.loads(self._system.cat_file(path))
                found[manifest["version"]] = manifest
        return found

    def pins(self) -> set[int]:
        """Returns the versions that must stay."""
        return self.read_pins()[0]

    def read_pins(self) -> tuple[set[int], str]:
        """Returns the versions that must stay, and the folder of releases that says so, or ""."""
        self._system.invalidate_cache()
        try:
            content = json.loads(self.read(PINS))
            return set(content["versions"]), content.get("owner", "")
        except FileNotFoundError:
            return set(), ""
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.url}/{PINS} is damaged ({error}); restore it, or delete it to pin nothing."
            ) from error

    def read(self, name: str) -> bytes:
        """Returns the content of a file. Raises FileNotFoundError."""
        return self._system.cat_file(f"{self._root}/{name}")

    def entries(self, version: int) -> list[Any]:
        """Returns the entries of all shards of a version. Raises BadPatch."""
        return [entry for entries in self.process_entries(version) for entry in entries]

    def process_entries(self, version: int) -> Iterator[list[Any]]:
        """Yields the entries of the shards that each process wrote. Raises BadPatch."""
        folder = version_folder(version)
        try:
            for process in range(json.loads(self.read(f"{folder}/manifest.json"))["processes"]):
                yield json.loads(self.read(f"{folder}/shards-{process:05d}.json"))
        except (FileNotFoundError, json.JSONDecodeError, KeyError) as error:
            raise BadPatch(f"version {version} is damaged or gone ({error})") from error

    def read_shards(
        self, version: int, kind: str, takes: Callable[[Mapping[str, Any]], bool]
    ) -> Iterator[tuple[Any, bytes]]:
        """Yields (entry, bytes) of the shards of a version that `takes` is true of, reading one after another.

        kind: "patch" or "full". Raises BadPatch.
        """
        for process, entries in enumerate(self.process_entries(version)):
            path, at = f"{self._root}/{version_folder(version)}/shards-{process:05d}.{kind}", 0
            for entry in entries:
                if "name" not in entry or (size := entry.get(f"{kind}_bytes")) is None:
                    raise BadPatch(f"version {version} is damaged: an entry lacks its name or {kind}_bytes")
                if takes(entry):
                    try:
                        data = self._system.cat_file(path, at, at + size) if size else b""
                    except FileNotFoundError as error:
                        raise BadPatch(f"the {kind} of version {version} is damaged or gone ({error})") from error
                    if len(data) < size:
                        raise BadPatch(f"the {kind} of version {version} is cut short")
                    yield entry, data
                at += size

    def write(self, name: str, data: bytes) -> None:
        """Writes a file; readers see all of it or nothing."""
        path = f"{self._root}/{name}"
        if self._is_local:
            write_atomically(path, data)
        else:
            self._system.pipe_file(path, data)

    def delete(self, name: str) -> None:
        """Deletes a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")

    def delete_version(self, version: int) -> None:
        """Deletes a version, its manifest first."""
        folder = f"{self._root}/{version_folder(version)}"
        self.delete(f"{version_folder(version)}/manifest.json")
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(folder, recursive=True)
