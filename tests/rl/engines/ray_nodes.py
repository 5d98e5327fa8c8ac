"""A Ray cluster on this machine, for tests where Ray is installed."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -r requirements-cluster.txt"
)


@contextlib.contextmanager
def cluster_of_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any]]]:
    """A cluster of one node without CPUs, for the learner, and two nodes, one of which has a GPU by its own account."""
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]  # optional

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    options = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
    try:
        yield cluster, [cluster.add_node(num_cpus=2, num_gpus=gpus, object_store_memory=80 << 20) for gpus in (0, 1)]
    finally:
        cluster.shutdown()
