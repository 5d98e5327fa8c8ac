"""Programs of CPU meshes stay out of the compilation cache; what JAX logs of a plugin that cannot start."""

import importlib.metadata
import logging
import os
import subprocess
import sys
import types

from jax._src import xla_bridge

from composer_jax.parallel import platform  # noqa: F401 - shortens what JAX logs


def test_a_plugin_without_a_driver_is_one_line_in_the_log(monkeypatch, caplog):
    def initialize():
        raise RuntimeError("cuInit(0) failed: 100%")

    monkeypatch.setitem(sys.modules, "cuda_plugin", types.SimpleNamespace(initialize=initialize))
    monkeypatch.setattr(xla_bridge.pkgutil, "iter_modules", lambda *_: [])
    entry_points = [types.SimpleNamespace(value="cuda_plugin")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entry_points)
    xla_bridge.discover_pjrt_plugins()
    (record,) = caplog.records
    line = logging.Formatter().format(record)
    assert line == (
        "Jax plugin configuration error: Exception when calling cuda_plugin.initialize(): cuInit(0) failed: 100%"
    )


def test_an_exception_that_is_the_message_keeps_its_traceback(caplog):
    error = RuntimeError("no driver")
    logging.getLogger(xla_bridge.__name__).error(error, exc_info=error)
    (record,) = caplog.records
    assert record.getMessage() == "no driver" and record.exc_info


TWO_PROGRAMS = """
import jax
from jax.sharding import NamedSharding, PartitionSpec

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
from composer_jax.parallel.mesh import make_mesh


def on_one_device(x):
    return x + 1


def on_two_devices(x):
    return jax.lax.fori_loop(0, 3, lambda i, total: total + (x + i).sum(), 0.0)


for _ in range(2):
    rows = NamedSharding(make_mesh(data=2), PartitionSpec("data"))
    jax.jit(on_one_device)(jax.numpy.ones(4))
    jax.jit(on_two_devices)(jax.device_put(jax.numpy.ones(4), rows))
"""


def test_programs_of_several_cpu_devices_are_not_kept(tmp_path):
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", TWO_PROGRAMS], env=environment, check=True, timeout=120)
    kept = {path.name.split("-")[0] for path in tmp_path.iterdir()}
    assert "jit_on_one_device" in kept and "jit_on_two_devices" not in kept
