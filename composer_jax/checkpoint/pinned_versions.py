"""Versions of a chain (weight_chain.py) that stay, and the way back to one of them.

A server takes versions that rise. So the way back to version M is a new version whose weights are those of M, written
in full and labelled {"restores": M}. A pinned version is stored in full, whatever the publisher deletes around it.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes  # noqa: F401 - numpy then knows bfloat16 by name
import numpy as np
import zstandard

from composer_jax.checkpoint.weight_chain import (
    PINS,
    ChainFiles,
    Published,
    Shard,
    WeightPublisher,
    WeightReceiver,
    array_part,
    version_folder,
)
from composer_jax.checkpoint.weight_patch import LEVEL, BadPatch
from composer_jax.errors import UserError


def pin_versions(folder: str, versions: Iterable[int], owner: str = "") -> None:
    """Makes these the pinned versions of a chain, each stored in full; others are no longer pinned.

    owner: the folder of releases that pins them; a chain has one.

    Raises:
      UserError: the chain has another owner or lacks a version, or a version cannot be built or written.
    """
    files, versions = ChainFiles(folder), set(versions)
    pins, other = files.read_pins()
    if other and other != owner:
        raise UserError(
            f"the versions of {folder} are released from {other}, not {owner or 'here'}; use that folder as "
            f"--workdir, or write the new one as the owner into {PINS} if it has moved."
        )
    if (versions, owner) != (pins, other):
        # First the file: from then on no publisher deletes a version that is still there.
        files.write(PINS, json.dumps({"versions": sorted(versions), "owner": owner}).encode())
    for version in sorted(versions):
        _store_in_full(files, version)


def restore_version(folder: str, version: int, as_version: int, labels: Mapping[str, Any] | None = None) -> Published:
    """Publishes the weights of one version as a newer one, in full, with the label {"restores": version}.

    Does nothing but return what it weighs if that was done before. No other process may publish meanwhile.

    Raises:
      UserError: `as_version` is taken by other weights or not above all versions, or `version` cannot be built.
    """
    manifests = ChainFiles(folder).manifests()
    if manifests.get(as_version, {}).get("restores") == version:
        size = sum(math.prod(entry["shape"]) for entry in ChainFiles(folder).entries(as_version))
        return Published(as_version, size, size, 0, 0)
    if as_version <= (newest := max(manifests, default=version)):
        raise UserError(
            f"version {as_version} cannot restore version {version}: {folder} has versions up to {newest}; use "
            f"{newest + 1}."
        )
    receiver = WeightReceiver(folder)
    receiver.receive(version)
    shards = {  # in the same parts, so that the hash is the same
        Shard(entry["name"], tuple(entry["start"]), tuple(entry["whole_shape"])): _part(receiver, entry)
        for entry in ChainFiles(folder).entries(version)
    }
    return WeightPublisher(folder).publish(shards, as_version, {**(labels or {}), "restores": version})


def weights_hash(folder: str, version: int) -> str:
    """Returns the SHA-256 over the hashes of all shards of a version, in hex; equal weights in equal shards have one.

    Raises:
      UserError: the chain has no such version, or its list of shards is damaged.
    """
    files = ChainFiles(folder)
    read_manifest(files, version)
    try:
        entries = files.entries(version)
    except BadPatch as error:
        raise UserError(f"version {version} of {folder} cannot be read: {error}.") from error
    rows = sorted([entry["name"], entry["start"], entry["dtype"], entry["sha256"]] for entry in entries)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def read_manifest(files: ChainFiles, version: int) -> Mapping[str, Any]:
    """Returns the manifest of a version. Raises a UserError if the chain lacks it."""
    manifests = files.manifests()
    if version not in manifests:
        available = f"versions {', '.join(map(str, sorted(manifests)[-8:]))}" if manifests else "no version"
        raise UserError(f"{files.url} has {available} of the weights, not {version}; name one that is there.")
    return manifests[version]


def _store_in_full(files: ChainFiles, version: int) -> None:
    """Adds the whole arrays to a version that has only patches; a receiver relies on them once the manifest says so."""
    manifest = read_manifest(files, version)
    if manifest["has_full"]:
        return
    receiver = WeightReceiver(files.url)
    receiver.receive(version)
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    for process, entries in enumerate(list(files.process_entries(version))):
        fulls = [compressor.compress(_part(receiver, entry).tobytes()) for entry in entries]
        entries = [entry | {"full_bytes": len(full)} for entry, full in zip(entries, fulls, strict=True)]
        stem = f"{version_folder(version)}/shards-{process:05d}"
        files.write(f"{stem}.full", b"".join(fulls))
        files.write(f"{stem}.json", json.dumps(entries).encode())
    files.write(f"{version_folder(version)}/manifest.json", json.dumps({**manifest, "has_full": True}).encode())


def _part(receiver: WeightReceiver, entry: Mapping[str, Any]) -> np.ndarray:
    return array_part(receiver.arrays[entry["name"]], entry["start"], entry["shape"])
