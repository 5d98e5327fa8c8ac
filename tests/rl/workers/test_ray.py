"""Workers on the nodes of a Ray cluster of this machine."""

import asyncio
import dataclasses
import importlib.util
import socket
import time

import pytest

from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.errors import UserError
from composer_jax.rl.rollout import play_episode
from composer_jax.rl.workers import ray_cluster
from composer_jax.rl.workers.pool import PoolOptions, WorkerPool
from composer_jax.rl.workers.ray_cluster import ClusterNode, EngineShare, RayCluster
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from composer_jax.tasks.result_cache import ResultCache
from tests.rl.workers.seeded_policy import CHAT, SeededPolicy, specs, until, worker_setup

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install -r requirements-cluster.txt")
TOKEN = "a token of the tests"
EPISODES = 16


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_a_sentence_names_the_extra():
    with pytest.raises(UserError, match="pip install"):
        RayCluster("auto")


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:10001", ":6379", "host:port"])
def test_an_address_that_is_none(address):
    with pytest.raises(UserError, match=f"--cluster={address} .* HOST:PORT"):
        ray_cluster._require_listener(address)


def test_an_address_that_does_not_answer_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UserError, match=f"127.0.0.1:{port} .*refused"):
        ray_cluster._require_listener(f"127.0.0.1:{port}")


def test_a_node_of_ray_has_whole_accelerators_of_one_kind():
    resources = {"CPU": 8.0, "GPU": 4.0, "memory": 1e9, "node:10.0.0.6": 1.0}
    entry = {"NodeID": "n", "NodeManagerAddress": "10.0.0.6", "Resources": resources}
    assert ClusterNode.from_ray(entry) == ClusterNode("n", "10.0.0.6", 8, 4, "GPU")
    entry["Resources"] = {"TPU": 4.0}
    assert ClusterNode.from_ray(entry) == ClusterNode("n", "10.0.0.6", 0, 4, "TPU")
    entry["Resources"] = {"CPU": 2.0, "GPU": 0.5}
    assert ClusterNode.from_ray(entry) == ClusterNode("n", "10.0.0.6", 2)


@pytest.mark.parametrize(
    ("node", "share", "engines", "cpus_of_each"),
    [
        (ClusterNode("n", "a", 8, 4, "GPU"), EngineShare(), 0, 1),
        (ClusterNode("n", "a", 8, 4, "GPU"), EngineShare(1), 4, 1),
        (ClusterNode("n", "a", 8, 4, "GPU"), EngineShare(2), 2, 1),
        (ClusterNode("n", "a", 8, 4, "GPU"), EngineShare(8), 0, 1),
        (ClusterNode("n", "a", 0, 4, "TPU"), EngineShare(4), 1, 0),
        (ClusterNode("n", "a", 1, 1, "GPU"), EngineShare(1), 1, 0),
        (ClusterNode("n", "a", 2), EngineShare(1), 0, 1),
        (ClusterNode("n", "a", 2), EngineShare(4, cpu_nodes=1), 1, 1),
        (ClusterNode("n", "a", 0), EngineShare(1, cpu_nodes=1), 0, 0),
    ],
)
def test_engines_leave_the_worker_of_their_node_a_cpu(node, share, engines, cpus_of_each):
    assert (share.engines(node), share.cpus(node)) == (engines, cpus_of_each)
    assert not node.cpus or node.cpus - engines * cpus_of_each >= 1


@needs_ray
@pytest.mark.slow
def test_a_listener_that_is_no_ray_cluster_is_refused_within_seconds(monkeypatch):
    monkeypatch.setattr(ray_cluster, "PROBE_S", 8.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.perf_counter()
        with pytest.raises(UserError, match="within 8 s"):
            RayCluster(f"127.0.0.1:{server.getsockname()[1]}")
        assert time.perf_counter() - began < 30


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of one node without CPUs, where the trainer is, and four nodes with two CPUs each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    options = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=80 << 20) for _ in range(4)]
    yield cluster, nodes
    cluster.shutdown()


@needs_ray
@pytest.mark.slow
def test_of_four_nodes_one_is_killed_and_every_episode_ends_once(cluster, tmp_path):
    """A fifth node joins afterwards and gets a worker, too."""
    cluster, nodes = cluster
    context = EpisodeContext(CHAT, None, cache=ResultCache())
    policy, ended = SeededPolicy(pause_after=180), []

    async def play(pool, spec):
        episode = await pool.play(spec, policy)
        ended.append(spec.seed)
        return episode

    async def main():
        local = SeededPolicy()
        async with LocalSandboxPool(SandboxLimits(), size=2) as sandboxes, local.serving():
            here = dataclasses.replace(context, pool=sandboxes)
            expected = await asyncio.gather(*(play_episode(spec, local, here) for spec in specs(EPISODES)))
        with RayCluster(cluster.address) as connection:
            pool = WorkerPool(PoolOptions(connection.host), worker_setup(tmp_path), TOKEN, context)
            async with policy.serving(), pool:
                starter = asyncio.create_task(connection.keep_workers(connection.host, pool.port, TOKEN, EngineShare()))
                await until(lambda: len(pool.workers) == 4, 240)
                playing = [asyncio.create_task(play(pool, spec)) for spec in specs(EPISODES)]
                await until(lambda: policy.waiting + len(ended) == EPISODES)
                running = policy.waiting
                began = time.perf_counter()
                await asyncio.to_thread(cluster.remove_node, nodes[2], allow_graceful=False)
                await until(lambda: pool.losses == 1)
                print(f"a killed node was noticed after {time.perf_counter() - began:.1f} s")
                await until(lambda: policy.waiting == running)  # those of the killed node elsewhere
                print(f"{len(policy.seeds) - EPISODES} of {running} running episodes were on the killed node")
                policy.gate.set()
                episodes = await asyncio.gather(*playing)
                assert sorted(pool.workers) == sorted(set(pool.workers)) and len(pool.workers) == 3
                cluster.add_node(num_cpus=2, object_store_memory=80 << 20)  # in the main thread: it handles signals
                await until(lambda: len(pool.workers) == 4, 240)
                starter.cancel()
                await asyncio.wait([starter])
        return episodes, expected

    episodes, expected = asyncio.run(main())
    assert sorted(ended) == [spec.seed for spec in specs(EPISODES)]
    assert episodes == expected
    assert {policy.seeds.count(spec.seed) for spec in specs(EPISODES)} == {1, 2}
