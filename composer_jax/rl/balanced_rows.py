"""The order of packed rows in which the shards of every batch have about the same work."""

from collections.abc import Sequence

import numpy as np


def balance_rows(costs: Sequence[float], batch_size: int, shards: int) -> list[int]:
    """Returns an order of rows; the i-th batch of it is rows i * batch_size to (i + 1) * batch_size.

    A shard has batch_size / shards adjacent rows of each batch, and the batch takes as long as its slowest shard. So
    rows of similar cost share a batch, and within it each row, the most expensive first, goes to the shard with the
    least cost so far that has room (longest processing time first, Graham 1969).

    Args:
      costs: of each row, in any unit; their number is a multiple of batch_size.
      shards: divides batch_size.
    """
    by_cost = np.argsort(-np.asarray(costs, np.float64), kind="stable")
    order: list[int] = []
    for first in range(0, len(by_cost), batch_size):
        members: list[list[int]] = [[] for _ in range(shards)]
        load = np.zeros(shards)
        for row in by_cost[first : first + batch_size]:
            is_full = np.array([len(rows) == batch_size // shards for rows in members])
            shard = int(np.argmin(np.where(is_full, np.inf, load)))
            members[shard].append(int(row))
            load[shard] += costs[row]
        order += [row for rows in members for row in rows]
    return order
