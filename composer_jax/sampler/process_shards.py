"""Global arrays as NumPy arrays in process 0, to which the other processes send the shards that they hold."""

from typing import Any

import jax
import numpy as np

from composer_jax.frames import Frame
from composer_jax.parallel.command_channel import CommandSender


def gather_shards(out: Any, sender: CommandSender | None) -> Any:
    """Returns a pytree of global arrays as NumPy arrays; the other processes reply with `shards_here`.

    Without a sender, when all processes compile programs, what the others hold is zeros. An all-gather in the program
    would wait for all devices, also where they decode independently of each other, and is slow between CPU devices.
    """
    leaves, tree = jax.tree.flatten(out)
    if not leaves:
        return out
    commands = [shards_here(out), *(sender.collect() if sender is not None else ())]
    arrays = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    for header, pieces in commands:
        for (number, bounds), piece in zip(header["pieces"], pieces, strict=True):
            arrays[number][tuple(slice(*pair) for pair in bounds)] = piece
    return jax.tree.unflatten(tree, arrays)


def shards_here(out: Any) -> Frame:
    """Returns the shards of a pytree's arrays that this process holds; of equal shards, one process sends one."""
    places, pieces = [], []
    for number, leaf in enumerate(jax.tree.leaves(out)):
        leaf.copy_to_host_async()
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                bounds = [part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape, strict=True)]
                places.append((number, bounds))
                pieces.append(shard.data)
    return {"pieces": places}, [np.asarray(piece) for piece in pieces]
