"""PageTables: the page tables of running contexts, which stay on the devices; a call sends what changed.

Every shard has a row for each of its running sequences and one for Runner.score. A device call names the rows that it
uses (4 bytes each), and the entries that changed since the last call go before it, 12 bytes each, padded to one of two
sizes so that two programs write any number of them. So the bytes of a call grow with its rows and with the pages that
its contexts gained, and not with how long contexts may become.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.parallel.mesh import BATCH_AXES
from composer_jax.parallel.processes import device_put_global
from composer_jax.sampler.sequence import Limits, SequenceState

FEWEST_CHANGES = 8
"""Entries per shard of the smaller program that writes, at least."""
MORE_CHANGES = 16
"""Times as many entries as the smaller program has the larger one."""


def write_program(mesh: Mesh) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    """Jitted: (tables int32 [shards*N,J], changes int32 [shards*U,3]) -> the tables with the changes.

    A change is (row of the shard, column, page); the row N is padding. The tables are donated.
    """

    def write(tables_NJ, changes_U3):
        row_U, column_U, page_U = changes_U3.T
        return tables_NJ.at[row_U, column_U].set(page_U, mode="drop")

    rows = PartitionSpec(BATCH_AXES)
    mapped = jax.shard_map(write, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False)
    return jax.jit(mapped, donate_argnums=0, out_shardings=NamedSharding(mesh, rows))


def read_program(mesh: Mesh, width: int) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    """Jitted: (tables int32 [shards*N,J], row numbers int32 [shards*B]) -> their first pages [shards*B,width]."""

    def read(tables_NJ, row_B):
        return tables_NJ[row_B, :width]

    rows = PartitionSpec(BATCH_AXES)
    mapped = jax.shard_map(read, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False)
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, rows))


class PageTables:
    """What the devices have of the tables, as the process knows that schedules. Forgetting a row only costs bytes."""

    def __init__(self, limits: Limits, length: int) -> None:
        """length: pages of the longest context."""
        self.n_rows, self.length, self._shards = limits.rows + 1, length, limits.shards
        fewest = max(FEWEST_CHANGES, limits.rows)
        self.write_sizes = fewest, MORE_CHANGES * fewest
        """Changes per shard that one write takes."""
        self._rows: list[dict[SequenceState, int]] = [{} for _ in range(limits.shards)]
        """Of each shard, the longest unused first."""
        self._known: list[list[tuple[list[int], int]]] = [[([], 0)] * self.n_rows for _ in range(limits.shards)]
        """SequenceState.pages whose beginning is in each row on the devices, and the number of pages there."""

    def new_array(self, mesh: Mesh) -> jax.Array:
        """Returns the tables of a PageTables that has sent nothing yet."""
        zeros = np.zeros((self._shards * self.n_rows, self.length), np.int32)
        return device_put_global(zeros, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))

    def rows(
        self, sequences: Sequence[SequenceState], places: Sequence[int], per_shard: int
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the rows that a call reads, int32 [shards*B], and the arguments of the writes before it, in order.

        places: of each sequence in the call. per_shard: B. At most Limits.rows different sequences are of one shard.
        """
        row_B = np.zeros(self._shards * per_shard, np.int32)
        changes: list[list[tuple[int, int, int]]] = [[] for _ in range(self._shards)]
        for sequence in sequences:
            self._touch(sequence)
        for sequence, place in zip(sequences, places, strict=True):
            row_B[place] = row = self._rows[sequence.shard][sequence]
            changes[sequence.shard] += self._changes(sequence, row)
        return row_B, self._writes(changes)

    def no_writes(self) -> list[np.ndarray]:
        """Returns arguments of all programs that write, which write nothing."""
        return [self._padding(size) for size in self.write_sizes]

    def _touch(self, sequence: SequenceState) -> None:
        """Makes sure that a sequence has a row, perhaps that of the one that was not used for longest."""
        rows = self._rows[sequence.shard]
        row = rows.pop(sequence, None)
        if row is None:
            row = len(rows) if len(rows) < self.n_rows else rows.pop(next(iter(rows)))
        rows[sequence] = row

    def _changes(self, sequence: SequenceState, row: int) -> list[tuple[int, int, int]]:
        (known, n), pages = self._known[sequence.shard][row], sequence.pages
        end = min(len(pages), self.length)
        if known is pages:
            columns = range(n, end)
        else:
            columns = [i for i in range(end) if i >= n or pages[i] != known[i]]
        # What the row has beyond the pages stays there, and nothing reads it.
        self._known[sequence.shard][row] = pages, end
        return [(row, column, pages[column]) for column in columns]

    def _writes(self, changes: list[list[tuple[int, int, int]]]) -> list[np.ndarray]:
        writes, (fewest, most), first = [], self.write_sizes, 0
        longest = max(map(len, changes))
        while first < longest:
            size = fewest if longest - first <= fewest else most
            write = self._padding(size)
            for shard, of_shard in enumerate(changes):
                if part := of_shard[first : first + size]:
                    write[shard * size : shard * size + len(part)] = part
            writes.append(write)
            first += size
        return writes

    def _padding(self, size: int) -> np.ndarray:
        return np.tile(np.array([self.n_rows, 0, 0], np.int32), (self._shards * size, 1))
