"""What engines of rl.engines="ray" are started with, and what they take of the nodes."""

from pathlib import Path

import pytest

from composer_jax.errors import UserError
from composer_jax.rl.engines.engine_places import ListedEngines
from composer_jax.rl.engines.engine_process import EngineCommand, EngineProcess
from composer_jax.rl.workers.pool import PoolOptions
from composer_jax.rl.workers.ray_cluster import EngineShare
from composer_jax.schema.run_config import run_config
from composer_jax.stages.engine_placement import engine_places, engine_share
from composer_jax.stages.rollout_workers import RolloutWorkersOptions
from launch import flags, hosts, serve
from tests.stages.fleet_config import get_config

CLUSTER = object()
WORKERS = RolloutWorkersOptions(PoolOptions(), "a token of the tests", CLUSTER)


def config_of(engines="ray", cpu_nodes=0, publish="weights", **sampler):
    config = get_config(publish)
    config.rl.engines, config.rl.fleet.cpu_nodes = engines, cpu_nodes
    config.sampler.update(sampler)
    return run_config(config)


def mesh(**axes):
    return {"mesh": {"replica": -1, "data": 1, "expert": 1, "context": 1, "tensor": 1} | axes}


def test_listed_engines_take_nothing_of_a_cluster():
    config = config_of("a:1,b:2")
    assert engine_places(config, None) == ListedEngines(("a:1", "b:2"))
    assert engine_share(config) == EngineShare() == engine_share(config_of("local"))


@pytest.mark.parametrize("workers", [None, RolloutWorkersOptions(PoolOptions(), "a token of the tests")])
def test_engines_of_ray_need_a_cluster(workers):
    with pytest.raises(UserError, match="run launch.rl with --cluster=auto or --cluster=HOST:PORT, or list"):
        engine_places(config_of(), workers)


def test_an_engine_takes_the_devices_of_its_mesh():
    assert engine_share(config_of(cpu_nodes=3)) == EngineShare(1, 3)
    assert engine_share(config_of(**mesh(expert=4, tensor=2))) == EngineShare(8)
    for axes, says in (({"replica": 2}, "replica=2 .* use 1"), ({"context": 2}, "context=2 .* use 1")):
        with pytest.raises(UserError, match=f"sampler.mesh.{says}"):
            engine_places(config_of(**mesh(**axes)), WORKERS)
    with pytest.raises(UserError, match="sampler.mesh.tensor=-1 .* use a number of devices"):
        engine_places(config_of(**mesh(replica=1, tensor=-1)), WORKERS)


def test_an_engine_is_started_with_flags_of_launch_serve_from_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of(slots=4, cache_tokens=0, drafts="prompt_lookup", draft_tokens=2, **mesh(expert=2))
    places = engine_places(config, WORKERS)
    command: EngineCommand = places._command
    assert places._cluster is CLUSTER and places._share == EngineShare(2)
    assert command.folder == str(tmp_path / "weights"), "engines have another working directory"
    assert engine_places(config_of(publish="gs://b/w"), WORKERS)._command.folder == "gs://b/w"
    words = EngineProcess(command, "10.0.0.6")._flags(Path("token"))
    values, rest = flags.parse_flags(["launch.serve", *words], flags._with(serve.define, hosts.define_flags))
    assert not rest and command.token == WORKERS.token
    assert values.checkpoint == f"patches:{tmp_path}/weights" and values.host == "10.0.0.6"
    assert (values.port, values.engine_port, values.processes, values.token_file) == (0, 0, 1, "token")
    assert (values.slots, values.max_model_len, values.cache_tokens) == (4, 512, 4 * 512)
    assert values.return_routed_experts and values.drafts == "prompt_lookup"
    assert (values.data, values.expert, values.tensor) == (1, 2, 1)
