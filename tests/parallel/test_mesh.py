"""The mesh, and the devices it is made of."""

import os

import jax
import pytest

from composer_jax.errors import UserError
from composer_jax.parallel.mesh import AXES, MeshConfig, batch_shards, make_mesh
from composer_jax.parallel.platform import configure_cpu


def test_axes_that_are_not_named_have_size_one():
    mesh = make_mesh(data=2, expert=4)
    assert dict(mesh.shape) == {"replica": 1, "data": 2, "expert": 4, "context": 1, "tensor": 1}
    assert mesh.axis_names == AXES
    assert batch_shards(mesh) == 8
    assert batch_shards(make_mesh(jax.devices()[:1])) == 1


def test_an_axis_of_minus_one_takes_the_remaining_devices():
    assert tuple(make_mesh(data=-1, context=2).shape.values()) == (1, 4, 1, 2, 1)
    assert tuple(make_mesh(replica=-1, data=8).shape.values()) == (1, 8, 1, 1, 1)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"model": 2}, UserError, "Unknown mesh axis 'model'.*replica, data, expert"),
        ({"data": 3}, UserError, "needs 3 devices, but there are 8"),
        ({"data": 4, "expert": 4}, UserError, "needs 16 devices, but there are 8"),
        ({"data": 0, "expert": 8}, UserError, "mesh.data=0 is not a number of devices"),
        ({"replica": -1, "data": 0}, UserError, "mesh.data=0 is not a number of devices"),
        ({"replica": -1, "data": -1}, UserError, "mesh.replica=-1 and mesh.data=-1: only one axis"),
        ({"data": 3, "replica": -1, "expert": 2}, UserError, "8 devices do not divide over data=3 x expert=2"),
    ],
    ids=str,
)
def test_impossible_meshes_are_refused_with_the_numbers(sizes, error, message):
    with pytest.raises(error, match=message):
        make_mesh(**sizes)


def test_a_config_without_fields_puts_every_device_on_replica():
    assert MeshConfig().make_mesh().shape["replica"] == len(jax.devices()) == 8


def test_a_config_without_remainder_uses_the_first_devices():
    mesh = MeshConfig(replica=1, data=2, tensor=2).make_mesh()
    assert dict(mesh.shape) == {"replica": 1, "data": 2, "expert": 1, "context": 1, "tensor": 2}
    assert list(mesh.devices.flat) == jax.devices()[:4]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert": 0}, "mesh.expert=0 is not a number of devices; use 1 or more"),
        ({"tensor": -2}, "mesh.tensor=-2"),
        ({"data": -1}, "mesh.replica=-1 and mesh.data=-1: only one axis"),
        ({"cpu_devices": -1}, "mesh.cpu_devices=-1 is negative"),
        ({"reduction": "sum"}, "mesh.reduction='sum' is unknown; use 'collective' or 'host'"),
        ({"reduce_dtype": "float16"}, "mesh.reduce_dtype='float16' is unknown; use 'float32' or 'bfloat16'"),
    ],
    ids=str,
)
def test_a_config_out_of_range_names_its_field(fields, message):
    with pytest.raises(UserError, match=message):
        MeshConfig(**fields)


def test_no_configured_number_keeps_that_of_jax(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    configure_cpu(0)
    assert len(jax.devices()) == 8


def test_a_running_process_cannot_get_more_devices(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    jax.devices()
    configure_cpu(8)
    configure_cpu(2)
    with pytest.raises(UserError, match="8 CPU devices and 16 are configured.*mesh.cpu_devices=8"):
        configure_cpu(16)


def test_the_thread_pool_has_room_for_every_device(monkeypatch):
    """XLA reads NPROC; a value that the user chose is kept."""
    monkeypatch.setattr(os, "environ", {})
    configure_cpu(8)
    assert int(os.environ["NPROC"]) >= 16
    monkeypatch.setattr(os, "environ", {"NPROC": "5"})
    configure_cpu(8)
    assert os.environ["NPROC"] == "5"
