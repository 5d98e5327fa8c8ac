"""What JAX logs of a plugin that cannot start."""

import importlib.metadata
import logging
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
