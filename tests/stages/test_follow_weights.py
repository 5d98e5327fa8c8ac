"""A server follows a folder of versions by itself: the newest, or that of its arm; a refused one leaves it as it is."""

import asyncio
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from starlette.testclient import TestClient

from composer_jax.checkpoint.checkpoint import describe_versions, open_checkpoint
from composer_jax.checkpoint.convert import convert
from composer_jax.checkpoint.weight_chain import WeightPublisher
from composer_jax.checkpoint.weight_shards import local_shards
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sampler import Sampler
from composer_jax.serve.app import new_app
from composer_jax.serve.service import ServerLimits, Service
from composer_jax.stages import follow_weights
from composer_jax.stages.follow_weights import WeightFollower, run_while_serving, version_to_serve
from composer_jax.stages.serve import ServeOptions, followed_folder
from composer_jax.stages.served_weights import ServedWeights
from tests.stages.base_model import NETWORK, write_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("follow") / "base")


def weights(seed: int) -> dict:
    params, bias = ModelDef(NETWORK).init(seed, make_mesh(jax.devices()[:1]))
    return {"params": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), "router_bias": bias}


@pytest.fixture
def folder(tmp_path, base):
    """A folder with version 1, and what describes it, as a trainer leaves it."""
    chain, run = tmp_path / "weights", tmp_path / "run"
    (run).mkdir()
    (run / "base").symlink_to(base)
    describe_versions(str(chain), ModelDef(NETWORK), str(run))
    WeightPublisher(str(chain)).publish(local_shards(weights(1)), 1)
    return str(chain)


@pytest.fixture(scope="module")
def sampler(base):
    text = open_checkpoint(f"hf:{base}").text
    sizes = SamplerConfig(slots=2, max_model_len=64, prefill_shapes=((2, 8),))
    return Sampler(ModelDef(NETWORK), make_mesh(jax.devices()[:1]), sizes, end_tokens=text.end_tokens)


@pytest.fixture
def service(folder, sampler):
    checkpoint = open_checkpoint(f"patches:{folder}")
    _, params, bias = checkpoint.load(sampler.mesh)
    sampler.update(params, bias, version=checkpoint.version)
    install = ServedWeights(sampler, NETWORK, None, mtp=False)
    return Service(sampler, checkpoint.text.named("small"), ServerLimits(), install)


def look(service, folder, arm="", **options) -> tuple[int, str]:
    """(version, why a version was refused) after one look."""

    async def once():
        async with service.sampler.serving():
            await WeightFollower(service, folder, arm, **options).look()

    asyncio.run(once())
    return service.sampler.version, service.health["refused"]


def test_a_folder_of_versions_is_a_checkpoint(folder, base):
    checkpoint = open_checkpoint(f"patches:{folder}")
    assert checkpoint.config == NETWORK and checkpoint.name == "weights"
    assert checkpoint.text.tokenizer.encode("a b") == open_checkpoint(f"hf:{base}").text.tokenizer.encode("a b")
    loaded = checkpoint.load()
    assert checkpoint.version == 1
    expected = jax.tree.map(lambda leaf: leaf.astype(NETWORK.param_dtype), weights(1)["params"])
    jax.tree.map(lambda a, b: None if (a == b).all() else pytest.fail("other weights"), loaded.params, expected)


def test_a_server_takes_the_newest_version_by_itself(folder, service):
    assert look(service, folder) == (1, "")
    WeightPublisher(folder).publish(local_shards(weights(2)), 5)
    assert look(service, folder) == (5, "")


def test_version_0_of_a_folder_replaces_weights_from_elsewhere(tmp_path, service, sampler):
    chain = str(tmp_path / "other")
    WeightPublisher(chain).publish(local_shards(weights(9)), 0)
    first = weights(1)
    sampler.update(first["params"], first["router_bias"], version=0)
    before = sampler.checksums
    assert look(service, chain) == (0, "") and sampler.checksums == before, "without it, 0 is the folder's own"
    assert look(service, chain, serves_other=True) == (0, "")
    assert sampler.checksums != before


def test_a_chain_that_was_begun_again_is_loaded_anew(folder, service):
    """A trainer goes on from a checkpoint: the versions after it are published once more, with other weights."""
    WeightPublisher(folder).publish(local_shards(weights(2)), 2)
    assert look(service, folder) == (2, "")
    before = service.sampler.checksums
    WeightPublisher(folder).publish(local_shards(weights(3)), 1)

    async def reload():
        async with service.sampler.serving():
            await WeightFollower(service, folder).reload()

    asyncio.run(reload())
    assert service.sampler.version == 1 and service.sampler.checksums != before
    WeightPublisher(folder).publish(local_shards(weights(4)), 1)
    before = service.sampler.checksums
    asyncio.run(reload())
    assert service.sampler.version == 1 and service.sampler.checksums != before, "other weights of the same version"


def test_an_arm_serves_what_its_release_says(folder, service):
    with pytest.raises(UserError, match="has no arms.json with a version for the arm 'anchor'"):
        version_to_serve(folder, "anchor")
    publisher = WeightPublisher(folder)
    for version in (2, 3):
        publisher.publish(local_shards(weights(version)), version)
    Path(folder, "arms.json").write_text(json.dumps({"anchor": 2, "candidate": 3}))
    assert look(service, folder, "anchor") == (2, "")
    assert look(service, folder, "candidate") == (3, "")
    version, refused = look(service, folder, "anchor")
    assert version == 3 and "version 2 is below version 3" in refused


def test_weights_that_were_pushed_above_all_versions_do_not_end_following(folder, service):
    """A rollback's version has a number above the folder's, which is below that of the pushed weights."""
    pushed = weights(8)

    async def push_and_look():
        async with service.sampler.serving():
            follower = WeightFollower(service, folder)
            await service.sampler.update_serving(pushed["params"], pushed["router_bias"], 50)
            assert await follower.look() and service.sampler.version == 1
            WeightPublisher(folder).publish(local_shards(weights(2)), 2)
            assert await follower.look() and service.sampler.version == 2

    asyncio.run(push_and_look())


@pytest.mark.parametrize("problem", ["missing", "damaged", "other network"])
def test_a_refused_version_leaves_the_server_where_it_is(folder, service, problem):
    publisher = WeightPublisher(folder)
    shards = local_shards(weights(2))
    if problem == "other network":
        shards = {shard: array for shard, array in shards.items() if "embed" not in shard.name}
    publisher.publish(shards, 2)
    if problem == "damaged":
        Path(folder, "version-00000002", "shards-00000.full").write_bytes(b"x")
    if problem == "missing":
        Path(folder, "arms.json").write_text(json.dumps({"anchor": 9, "candidate": 9}))
    version, refused = look(service, folder, "anchor" if problem == "missing" else "")
    assert version == 1 and refused
    Path(folder, "arms.json").unlink(missing_ok=True)
    WeightPublisher(folder).publish(local_shards(weights(3)), 3)
    assert look(service, folder) == (3, ""), "the next one heals it"


def test_a_refused_version_is_read_once(folder, service):
    installs, install = [], service.install_weights
    shards = {shard: array for shard, array in local_shards(weights(2)).items() if "embed" not in shard.name}
    WeightPublisher(folder).publish(shards, 2)

    async def counted(address, version, **options):
        installs.append(version)
        await install(address, version, **options)

    service.install_weights = counted
    follower = WeightFollower(service, folder)

    async def look_three_times():
        async with service.sampler.serving():
            assert [await follower.look() for _ in range(3)] == [False] * 3

    asyncio.run(look_three_times())
    assert installs == [2] and "another network" in service.health["refused"]


def test_the_newest_version_is_found_without_reading_manifests(folder):
    for manifest in Path(folder).glob("version-*/manifest.json"):
        manifest.write_text("not read")
    assert version_to_serve(folder, "") == 1


def test_the_application_follows_while_it_serves(folder, service, monkeypatch):
    monkeypatch.setattr(follow_weights, "POLL_S", 0.01)
    app = new_app(service)
    run_while_serving(app, WeightFollower(service, folder).run)
    WeightPublisher(folder).publish(local_shards(weights(4)), 4)
    with TestClient(app) as client:
        while (health := client.get("/health").json())["weight_version"] != 4:
            assert not health["refused"]
    assert health["follows"] == f"patches:{folder}" and health["arm"] == ""


def test_where_the_folder_comes_from():
    assert followed_folder("patches:a", ServeOptions()) == "a"
    assert followed_folder("hf:b", ServeOptions(follow="a")) == "a"
    assert followed_folder("hf:b", ServeOptions()) == ""
    with pytest.raises(UserError, match="--arm=anchor is an arm of a release"):
        followed_folder("hf:b", ServeOptions(arm="anchor"))


def test_a_folder_that_does_not_say_its_network(folder):
    Path(folder, "network.json").unlink()
    with pytest.raises(UserError, match="has no network.json"):
        open_checkpoint(f"patches:{folder}").config  # noqa: B018


def test_nothing_is_converted_into_versions(folder, tmp_path):
    with pytest.raises(UserError, match="which is not written; use hf:DIR"):
        convert(f"patches:{folder}", f"patches:{tmp_path / 'out'}")
    assert str(convert(f"patches:{folder}", f"hf:{tmp_path / 'out'}")).startswith("hf:")
