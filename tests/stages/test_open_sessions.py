"""What bounds the open sessions of a run's sampler beside the memory of its cache."""

from types import SimpleNamespace

import jax
import pytest

from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.rl.workers.pool import PoolOptions
from composer_jax.schema.run_config import run_config
from composer_jax.stages import rollout_services
from composer_jax.stages.rollout_services import RolloutServices
from composer_jax.stages.rollout_workers import RolloutWorkersOptions
from tests.scale.configuration import small_config


@pytest.fixture
def bounds(monkeypatch, tmp_path):
    """(changes of the config, workers, whether a rollout is replayed) -> what bounds the sessions of the sampler."""

    def find(changes, workers=None, replays=False):
        config = run_config(small_config(**{"agent__concurrency": 5, "sampler__slots": 4} | changes))
        mesh, chat = make_mesh(jax.devices()[:1]), SimpleNamespace(end_tokens=(0,))
        model = SimpleNamespace(definition=ModelDef(config.model), mesh=mesh, chat=chat)
        services = RolloutServices(config, tmp_path, model, workdir=None)
        services.worker_options = workers
        services.only_fitting |= replays
        return services.sampler["most_sessions"], services.sampler["only_fitting"]

    monkeypatch.setattr(rollout_services, "Sampler", lambda *_, **options: options)
    return find


def test_beyond_the_slots_no_more_sessions_open_than_this_process_has_sandboxes(bounds):
    """Else episodes would take sessions, fill the cache, and wait for sandboxes."""
    assert bounds({}) == (5, False)


def test_as_many_sessions_as_slots_open_however_few_sandboxes_there_are(bounds):
    assert bounds({"sampler__slots": 8}) == (8, False)


def test_workers_ask_for_no_more_sessions_than_they_have_room_for(bounds):
    assert bounds({}, RolloutWorkersOptions(PoolOptions(host="", local_episodes=3), token="")) == (None, False)


@pytest.mark.parametrize(("changes", "replays"), [({"rl__deterministic": True}, False), ({}, True)])
def test_in_deterministic_runs_and_replays_sessions_keep_their_pages(bounds, changes, replays):
    assert bounds(changes, replays=replays) == (5, True)
