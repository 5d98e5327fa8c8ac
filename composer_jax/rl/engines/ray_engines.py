"""RayEngines: engines on the accelerators of the nodes of a Ray cluster, beside its rollout workers."""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from composer_jax.errors import UserError
from composer_jax.rl.engines.engine_places import EnginePlace, EngineRefused
from composer_jax.rl.engines.engine_process import EngineCommand, EngineProcess
from composer_jax.rl.workers.ray_cluster import POLL_S, ClusterNode, EngineShare, NodeActor, RayCluster


class RayEngines:
    """EnginePlaces of a cluster. A node that joins gets its engines; one that dies takes them along.

    An engine is a process of its own, a child of an actor that reserves its accelerators.
    """

    def __init__(self, cluster: RayCluster, share: EngineShare, command: EngineCommand) -> None:
        """share: what engines take of the nodes."""
        self._cluster, self._share, self._command = cluster, share, command
        self.advice = (
            f"rl.engines='ray' starts an engine on every {share.devices} GPU or TPU that Ray has on a node (as many as "
            f"sampler.mesh has devices), and on rl.fleet.cpu_nodes={share.cpu_nodes} nodes without any; let such nodes "
            "join the cluster, or change these fields."
        )

    async def looks(self) -> AsyncIterator[Sequence[EnginePlace]]:
        """See EnginePlaces.looks; ends all engines when it is cancelled."""
        places: dict[tuple[str, int], _RayEngine] = {}
        try:
            while True:
                try:
                    nodes = await asyncio.to_thread(self._cluster.nodes)
                except Exception:  # the cluster may come back; without engines the router ends the run with a sentence
                    logging.exception("The nodes of the Ray cluster cannot be listed.")
                else:
                    self._update(places, nodes)
                    yield list(places.values())
                await asyncio.sleep(POLL_S)
        finally:
            await asyncio.gather(*(life for place in places.values() if (life := place.stop())), return_exceptions=True)

    def _update(self, places: "dict[tuple[str, int], _RayEngine]", nodes: Iterable[ClusterNode]) -> None:
        there = {node.node_id: node for node in nodes}
        for key in [key for key in places if key[0] not in there]:
            logging.warning("The Ray node %s is gone, and its engine with it.", key[0])
            places.pop(key).stop()
        for node in self._chosen(there, {node_id for node_id, _ in places}):
            for number in range(self._share.engines(node)):
                if (node.node_id, number) not in places:
                    places[node.node_id, number] = _RayEngine(self._cluster, self._share, node, self._command)

    def _chosen(self, nodes: Mapping[str, ClusterNode], used: set[str]) -> list[ClusterNode]:
        """Returns the nodes that have engines; nodes without accelerators that have one keep it."""
        ordered = sorted(nodes.values(), key=lambda node: (node.node_id not in used, node.node_id))
        able = [node for node in ordered if self._share.engines(node)]
        on_cpus = itertools.islice((node for node in able if not node.kind), self._share.cpu_nodes)
        return [*(node for node in able if node.kind), *on_cpus]


class _RayEngine:
    """The place of one engine on a node: an EnginePlace."""

    def __init__(self, cluster: RayCluster, share: EngineShare, node: ClusterNode, command: EngineCommand) -> None:
        self.name = node.address
        self._cluster, self._share, self._node, self._command = cluster, share, node, command
        self._refusal = ""
        self._life: asyncio.Task[None] | None = None
        self._address: asyncio.Future[str]

    async def locate(self) -> str:
        """See EnginePlace.locate: starts an engine if there is none."""
        if self._refusal:  # it would be refused again
            raise EngineRefused(self._refusal)
        if self._life is None:
            self._address = asyncio.get_running_loop().create_future()
            self._life = asyncio.create_task(self._live(self._address))
        return await asyncio.shield(self._address)

    def stop(self) -> asyncio.Task[None] | None:
        """Ends the engine, if there is one; it has ended when the task has."""
        if self._life is not None:
            self._life.cancel()
        return self._life

    async def _live(self, address: asyncio.Future[str]) -> None:
        """Starts an engine and waits for its end, after which `locate` starts another one unless it was refused."""
        try:
            await self._run(address)
        except UserError as error:
            self._refusal = f"cannot be started: {str(error).rstrip('.')}"
            if not address.done():
                address.set_exception(EngineRefused(self._refusal))
        except Exception as error:  # EngineEnded, ActorLost, and errors of Ray, such as of a node that dies meanwhile
            logging.warning("The engine of the Ray node %s is gone: %s", self.name, error)
            if not address.done():
                address.set_exception(ConnectionError(str(error)))
        self._life = None

    async def _run(self, address: asyncio.Future[str]) -> None:
        """Raises why an engine has ended."""
        actor = await asyncio.to_thread(self._start)
        try:
            address.set_result(await actor.call("start", dataclasses.asdict(self._command), self.name))
            await actor.call("wait")
        finally:
            actor.kill()

    def _start(self) -> NodeActor:
        return self._cluster.start_actor(_EngineActor, self._node, self._share.cpus(self._node), self._share.devices)


class _EngineActor:
    """The actor of one engine."""

    def start(self, command: dict[str, Any], host: str) -> str:
        """See EngineProcess.start."""
        self._process = EngineProcess(EngineCommand(**command), host)
        return self._process.start()

    def wait(self) -> None:
        """See EngineProcess.wait."""
        self._process.wait()
