"""RayCluster: the nodes of a Ray cluster. It starts one rollout worker on each, and further actors on demand.

Episodes travel as with every other worker.
"""

import asyncio
import dataclasses
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Self

from absl import logging

from composer_jax.errors import UserError
from composer_jax.host_port import split_host_port
from composer_jax.rl.workers.worker import EPISODES_PER_CPU, WorkerOptions

CONNECT_S = 5.0
"""Seconds in which the machine of a cluster's address accepts a connection."""
PROBE_S = 30.0
"""Seconds in which a process of its own joins the cluster: ray.init waits for two minutes, then ends its process."""
POLL_S = 3.0
"""Seconds between two looks at the nodes of the cluster; a node that joins has a worker so much later."""

ACCELERATORS = ("GPU", "TPU")
"""Resources of Ray that JAX computes on."""

_PROBE = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"


@dataclasses.dataclass(frozen=True)
class ClusterNode:
    """A node of a Ray cluster that is alive."""

    node_id: str
    address: str
    """Of its machine, without a port."""
    cpus: int
    accelerators: int = 0
    kind: str = ""
    """Which of ACCELERATORS they are; "" without any."""

    @classmethod
    def from_ray(cls, node: Mapping[str, Any]) -> Self:
        """Makes the node of an entry of ray.nodes()."""
        numbers = {name: int(node["Resources"].get(name, 0)) for name in ("CPU", *ACCELERATORS)}
        kind = next((name for name in ACCELERATORS if numbers[name]), "")
        return cls(node["NodeID"], node["NodeManagerAddress"], numbers["CPU"], numbers[kind] if kind else 0, kind)


@dataclasses.dataclass(frozen=True)
class EngineShare:
    """What engines that Ray places take of the nodes (rl/engines/ray_engines.py); workers leave it to them."""

    devices: int = 0
    """Accelerators of one engine; with 0 Ray places none."""
    cpu_nodes: int = 0
    """Nodes without accelerators that get an engine, too."""

    def engines(self, node: ClusterNode) -> int:
        """Returns how many engines a node may get."""
        if not self.devices:
            return 0
        if node.kind:
            return node.accelerators // self.devices
        return int(self.cpu_nodes > 0 and node.cpus > 0)

    def cpus(self, node: ClusterNode) -> int:
        """Returns the CPUs that each engine of a node reserves: one, if the node's worker keeps one then."""
        return int(node.cpus > self.engines(node))


class ActorLost(Exception):
    """An actor or its node is gone; the text says why."""


class NodeActor:
    """An actor on one node. It ends when its last reference or the connection to the cluster does."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    async def call(self, method: str, *arguments: Any) -> Any:
        """Returns what a method of the actor returns; calls run one after another.

        Raises ActorLost, and what the method raises.
        """
        errors = self._ray.exceptions
        result = getattr(self._actor, method).remote(*arguments)
        try:  # Ray completes the future of a caller that is cancelled, too
            return await asyncio.shield(asyncio.wrap_future(result.future()))
        except errors.RayTaskError as error:
            raise error.cause from error
        except errors.RayActorError as error:
            raise ActorLost(str(error)) from error

    def kill(self) -> None:
        """Ends the actor's process at once."""
        self._ray.kill(self._actor)


class RayCluster:
    """A connection to a Ray cluster, of which this machine is a node. A context manager whose end ends the workers."""

    def __init__(self, address: str):
        """Connects, within seconds. Raises UserError if Ray is not installed, or no cluster answers at the address.

        Args:
          address: HOST:PORT of the cluster's head node, or "auto" for the cluster of this machine.
        """
        try:
            import ray  # pyright: ignore[reportMissingImports]  # optional
        except ImportError:
            raise UserError(
                f"--cluster={address} needs Ray, which is not installed; run pip install 'composer_jax[cluster]'."
            ) from None
        self._ray = ray
        if address != "auto":
            _require_listener(address)
        _require_cluster(address)
        before = signal.getsignal(signal.SIGTERM)
        ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
        signal.signal(signal.SIGTERM, before)  # Ray's handler ends the process without saving
        self._actors: dict[str, tuple[Any, Any]] = {}  # node -> its worker, and what becomes of it
        self._unfit: set[str] = set()

    @property
    def host(self) -> str:
        """The address by which other nodes reach this one."""
        return self._ray.util.get_node_ip_address()

    def nodes(self) -> list[ClusterNode]:
        """Returns the nodes that are alive. Blocks, and raises errors of Ray."""
        return [ClusterNode.from_ray(node) for node in self._ray.nodes() if node["Alive"]]

    def start_actor(self, actor_class: type, node: ClusterNode, cpus: int, accelerators: int) -> NodeActor:
        """Starts an actor, which Ray does not start again. Blocks, and raises errors of Ray.

        cpus, accelerators: what the actor reserves of its node; calls wait while the node has less left.
        """
        devices = {"num_gpus": accelerators} if node.kind == "GPU" else {"resources": {node.kind: accelerators}}
        options = {"num_cpus": cpus, "max_restarts": 0} | (devices if node.kind else {})
        return NodeActor(self._ray, self._on_node(actor_class, node.node_id, **options).remote())

    async def keep_workers(self, host: str, port: int, token: str, share: EngineShare) -> None:
        """Starts a worker on every node, also on those that join later, until it is cancelled.

        Ray restarts a worker process that dies; a node that dies takes its worker along. A worker reserves the CPUs of
        its node that engines leave, and plays EPISODES_PER_CPU episodes on each; a node without CPUs
        (ray start --num-cpus=0) gets none.

        Args:
          host, port: where the trainer listens.
          token: what workers must know.
          share: what engines take of the nodes.
        """
        options = WorkerOptions(host, port, token, patience_s=math.inf)
        while True:
            try:
                await asyncio.to_thread(self._update, options, share)
            except Exception:  # the cluster may come back; without workers the pool ends the run with a sentence
                logging.exception("The nodes of the Ray cluster cannot be listed.")
            await asyncio.sleep(POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()

    def _update(self, options: WorkerOptions, share: EngineShare) -> None:
        nodes = {node.node_id: node for node in self.nodes()}
        for node_id in self._actors.keys() - nodes.keys():
            logging.warning("The Ray node %s is gone.", node_id)
            actor, _ = self._actors.pop(node_id)
            self._ray.kill(actor)  # Ray would wait for the node, to start its worker again
        for node_id, node in nodes.items():
            cpus = node.cpus - share.engines(node) * share.cpus(node)
            if cpus and node_id not in self._actors and node_id not in self._unfit:
                self._actors[node_id] = self._start(node_id, cpus, options)
        for node_id, (_, ending) in list(self._actors.items()):
            ended, _ = self._ray.wait([ending], timeout=0)
            if ended:
                self._report(node_id, ending, nodes[node_id].address)

    def _start(self, node_id: str, cpus: int, options: WorkerOptions) -> tuple[Any, Any]:
        actor = self._on_node(_RayWorker, node_id, num_cpus=cpus, max_restarts=-1, max_task_retries=-1).remote()
        return actor, actor.run.remote(
            dataclasses.asdict(dataclasses.replace(options, episodes=EPISODES_PER_CPU * cpus))
        )

    def _on_node(self, actor_class: type, node_id: str, **options: Any) -> Any:
        from ray.util import scheduling_strategies  # pyright: ignore[reportMissingImports]  # optional

        strategy = scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
        return self._ray.remote(actor_class).options(scheduling_strategy=strategy, **options)

    def _report(self, node_id: str, ending: Any, address: str) -> None:
        """Says why a worker has ended. One that raised is not started again: it would raise again."""
        try:
            self._ray.get(ending)
        except self._ray.exceptions.RayActorError as error:  # the next look starts another, if the node is there
            logging.warning("The worker of the Ray node %s is gone: %s", address, error)
        except self._ray.exceptions.RayTaskError as error:
            logging.warning("The Ray node %s plays no episodes: %s", address, error.cause)
            self._unfit.add(node_id)
        del self._actors[node_id]


class _RayWorker:
    """The actor of one node."""

    def run(self, options: dict[str, Any]) -> None:
        from composer_jax.rl.workers.worker import WorkerOptions, run_worker

        asyncio.run(run_worker(WorkerOptions(**options)))


def _require_listener(address: str) -> None:
    host, port = split_host_port(address) or ("", 0)
    if not host:
        raise UserError(
            f"--cluster={address} is not the address of a Ray cluster; use auto or HOST:PORT of its head node."
        )
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        raise UserError(f"No Ray cluster answers at --cluster={address} ({error}); {_ADVICE}") from error


_ADVICE = "start one with ray start --head, or correct the address."


def _require_cluster(address: str) -> None:
    command = [sys.executable, "-c", _PROBE, address]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"No Ray cluster answers at --cluster={address} within {PROBE_S:g} s; {_ADVICE}") from None
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no reason"])[-1]
        raise UserError(f"This machine cannot join the Ray cluster --cluster={address} ({last}); {_ADVICE}")
