"""RayEngines on made-up nodes, whose actors have engines in this process on the real wire, and on nodes of Ray."""

import asyncio
import contextlib
import dataclasses

import psutil
import pytest

from composer_jax.errors import UserError
from composer_jax.rl.engines import connection, ray_engines, router
from composer_jax.rl.engines.config import FleetConfig
from composer_jax.rl.engines.engine_process import EngineCommand, EngineEnded
from composer_jax.rl.engines.ray_engines import RayEngines
from composer_jax.rl.workers.ray_cluster import ActorLost, ClusterNode, EngineShare, RayCluster
from tests.rl.engines.ray_nodes import cluster_of_nodes, needs_ray
from tests.rl.engines.seeded_engine import TOKEN, Engine, new_fleet
from tests.rl.engines.test_places import play
from tests.rl.workers.seeded_policy import until

COMMAND = EngineCommand("folder", ("--slots=8",), TOKEN)


class Actor:
    """What a node's actor would do: `call` runs one method after another."""

    def __init__(self, error):
        self.error, self.ending, self.engine = error, asyncio.Event(), Engine()

    async def call(self, method, *arguments):
        if method == "start":
            assert arguments == (dataclasses.asdict(COMMAND), "127.0.0.1")
            if self.error is not None:
                raise self.error
            self.stack = contextlib.AsyncExitStack()
            await self.stack.enter_async_context(self.engine.serving())
            await self.stack.enter_async_context(self.engine.listening())
            return f"127.0.0.1:{self.engine.port}"
        await self.ending.wait()
        await self.end()
        raise EngineEnded("its process has ended with exit code -9: killed")

    async def end(self):
        with contextlib.suppress(AssertionError):  # sessions that were open
            await self.stack.aclose()

    def kill(self):
        if hasattr(self, "stack") and not self.ending.is_set():
            self.ending.set()
            self.killing = asyncio.create_task(self.end())


class Cluster:
    """nodes: those that are alive. errors: of the next engines that start."""

    def __init__(self, *nodes):
        self.there, self.actors, self.errors = nodes, [], []
        self.loop = asyncio.get_running_loop()

    def nodes(self):
        return list(self.there)

    def start_actor(self, actor_class, node, cpus, accelerators):
        actor = Actor(self.errors.pop(0) if self.errors else None)
        self.actors.append((node.node_id, cpus, accelerators, actor))
        return actor

    def started(self):
        return sorted((node, cpus, accelerators) for node, cpus, accelerators, _ in self.actors)

    def actor(self, node_id):
        return next(actor for node, _, _, actor in reversed(self.actors) if node == node_id)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(connection, "RETRY_S", 0.05)
    monkeypatch.setattr(router, "LOOK_S", 0.05)
    monkeypatch.setattr(ray_engines, "POLL_S", 0.05)


def node(name, cpus=4, accelerators=0):
    return ClusterNode(name, "127.0.0.1", cpus, accelerators, "GPU" if accelerators else "")


def fleet_of(cluster, share, patience_s=60.0):
    return new_fleet([], FleetConfig(patience_s=patience_s), places=RayEngines(cluster, share, COMMAND))


async def newest(fleet, number):
    await until(lambda: fleet.metrics()["engines_newest"] == number)


async def test_accelerators_have_an_engine_each_and_so_many_nodes_of_cpus_as_the_config_says():
    cluster = Cluster(node("a", accelerators=4), node("b", accelerators=1), node("c"), node("d"), node("e", cpus=0))
    async with fleet_of(cluster, EngineShare(2, cpu_nodes=1)).serving() as fleet:
        await newest(fleet, 3)
        assert cluster.started() == [("a", 1, 2), ("a", 1, 2), ("c", 1, 2)]
        cluster.there = (node("a", accelerators=4), node("d"), node("b2", accelerators=2, cpus=0))
        await until(lambda: len(cluster.actors) == 5)
        await newest(fleet, 4)
        assert cluster.started() == [("a", 1, 2), ("a", 1, 2), ("b2", 0, 2), ("c", 1, 2), ("d", 1, 2)]
        cluster.there = (*cluster.there, node("c"), node("0"))
        await asyncio.sleep(0.3)
        assert len(cluster.actors) == 5, "the engine on d stays there"
    assert all(actor.ending.is_set() for *_, actor in cluster.actors), "the engines end with the run"


async def test_a_node_that_dies_takes_its_engine_along_and_no_token_changes():
    cluster = Cluster(node("a", accelerators=1))
    async with fleet_of(cluster, EngineShare(1)).serving() as fleet:
        expected = [await play(fleet, seed) for seed in range(4)]
        cluster.actor("a").engine.pause_after = 10
        playing = [asyncio.create_task(play(fleet, seed)) for seed in range(4)]
        await until(lambda: cluster.actor("a").engine.waiting == 4)
        cluster.there = (node("b", accelerators=1),)
        assert await asyncio.gather(*playing) == expected
        assert fleet.resampled == 4 and fleet.metrics()["engines_lost"] == 1
        samples = [len(cluster.actor(name).engine.samples) for name in "ab"]
        assert samples[1] >= 4 and sum(samples) == 2 * 4 * 3 + 4


@pytest.mark.parametrize("lost", [EngineEnded("its process has ended with exit code 1: no"), ActorLost("gone")])
async def test_an_engine_that_has_ended_is_started_again(lost, caplog):
    cluster = Cluster(node("a", accelerators=1))
    cluster.errors = [lost]
    async with fleet_of(cluster, EngineShare(1)).serving() as fleet:
        tokens = await play(fleet, 3)
        assert len(cluster.actors) == 2 and str(lost) in caplog.text
        cluster.actor("a").ending.set()
        await until(lambda: len(cluster.actors) == 3)
        assert await play(fleet, 3) == tokens
        assert fleet.metrics()["engines_lost"] == 1


async def test_an_engine_that_is_refused_is_not_started_again_and_named_in_the_sentence():
    cluster = Cluster(node("a", accelerators=1))
    cluster.errors = [UserError("a cache of 8 GB does not fit.")] * 9
    async with fleet_of(cluster, EngineShare(1)).serving() as fleet:
        with pytest.raises(UserError, match="127.0.0.1 cannot be started: a cache of 8 GB does not fit. rl.engines"):
            await fleet.open(1)
        await asyncio.sleep(0.3)
        assert len(cluster.actors) == 1


async def test_a_cluster_without_accelerators_is_named_with_the_way_out():
    async with fleet_of(Cluster(node("c")), EngineShare(8), patience_s=0.3).serving() as fleet:
        with pytest.raises(UserError, match="there is none. rl.engines='ray' .* every 8 .* rl.fleet.cpu_nodes=0"):
            await fleet.open(1)


async def test_nodes_that_cannot_be_listed_for_a_while_keep_their_engines(caplog):
    cluster = Cluster(node("a", accelerators=1))
    async with fleet_of(cluster, EngineShare(1)).serving() as fleet:
        await newest(fleet, 1)
        there, cluster.there = cluster.there, None
        await until(lambda: "The nodes of the Ray cluster cannot be listed" in caplog.text)
        assert await play(fleet, 1) and len(cluster.actors) == 1
        cluster.there = there


@pytest.fixture
def ray_nodes(monkeypatch):
    monkeypatch.setattr(ray_engines, "POLL_S", 1.0)
    with cluster_of_nodes(monkeypatch) as nodes:
        yield nodes


@needs_ray
@pytest.mark.slow
async def test_on_nodes_of_ray_engines_join_die_and_are_started_again_and_no_token_changes(ray_nodes, tmp_path):
    """The engines are processes of the nodes; only their tokens are made up."""
    cluster, (on_cpu, _) = ray_nodes
    (tmp_path / "version-00000000").mkdir()
    (tmp_path / "version-00000000" / "manifest.json").write_text("{}")
    command = EngineCommand(str(tmp_path), ("--pause_s=0.5",), TOKEN, ("-m", "tests.rl.engines.seeded_process"))
    seeds, engine = range(8), Engine()
    async with engine.serving():
        expected = [await play(engine, seed) for seed in seeds]

    def processes():
        of_run = f"--checkpoint=patches:{tmp_path}"
        return [one for one in psutil.process_iter(["cmdline"]) if of_run in (one.info["cmdline"] or ())]

    async def until_processes(number):
        async with asyncio.timeout(60):
            while len(processes()) != number:
                await asyncio.sleep(0.5)

    with RayCluster(cluster.address) as connection:
        places = RayEngines(connection, EngineShare(1, cpu_nodes=1), command)
        async with (fleet := new_fleet([], FleetConfig(patience_s=600), places=places)).serving():
            await until(lambda: fleet.metrics()["engines_newest"] == 2, 300)
            left = connection._ray.available_resources()
            assert left["CPU"] == 2 and not left.get("GPU"), "a CPU of each node is left to its worker"
            playing = [asyncio.create_task(play(fleet, seed)) for seed in seeds]
            await until(lambda: all(link.connection._messages for link in fleet.router.links))
            await asyncio.to_thread(cluster.remove_node, on_cpu, allow_graceful=False)
            assert await asyncio.gather(*playing) == expected
            assert fleet.metrics()["engines_lost"] == 1 and 1 <= fleet.resampled <= 4
            await until_processes(1)
            cluster.add_node(num_cpus=2, object_store_memory=80 << 20)  # in the main thread: it handles signals
            await until(lambda: fleet.metrics()["engines_newest"] == 2, 300)
            for process in processes():
                process.kill()
            await until(lambda: fleet.metrics()["engines_lost"] == 3)
            await until(lambda: fleet.metrics()["engines_newest"] == 2, 300)
            assert await asyncio.gather(*(play(fleet, seed) for seed in seeds)) == expected
        await until_processes(0)
