"""Records which functions of a workspace each test calls; runs in the process of the tests (pytest_runner.py).

`plugin(say)` is a pytest plugin that sends {"traced": test id, "calls": ["path::Qual.name", ...]} for each test,
fixtures included. Paths are relative to the working folder. Names are those of the code objects; a lambda or a
comprehension counts for the function around it. Python 3.12 and later report each function once per test
(sys.monitoring); older versions trace every call (sys.settrace), which is slower.
"""

import os
import sys
import threading
from typing import Any

import pytest

MONITORING: Any = getattr(sys, "monitoring", None)  # Python 3.12 and later
TOOL = 4  # one of the six tool ids of sys.monitoring, without a fixed use


def plugin(say):
    return Tracer(say, os.getcwd() + os.sep)


class Tracer:
    def __init__(self, say, root):
        self.say, self.root = say, root
        self.codes = set()
        self.names = {}  # code -> name, None for code outside the workspace
        self.start = self.start_monitoring if MONITORING else self.start_tracing
        self.stop = self.stop_monitoring if MONITORING else self.stop_tracing

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.codes = set()
        self.start()
        try:
            return (yield)
        finally:
            self.stop()
            calls = {self.name(code) for code in list(self.codes)} - {None}
            self.say(traced=item.nodeid, calls=sorted(calls))

    def name(self, code):
        if code not in self.names:
            self.names[code] = self.find_name(code)
        return self.names[code]

    def find_name(self, code):
        path = code.co_filename
        parts = code.co_qualname.split(".")
        while parts and parts[-1].startswith("<"):
            parts.pop()
        if not path.startswith(self.root) or not parts:
            return None
        return f"{path.removeprefix(self.root).replace(os.sep, '/')}::{'.'.join(parts)}"

    def start_monitoring(self):
        if MONITORING.get_tool(TOOL) is None:
            MONITORING.use_tool_id(TOOL, "composer_jax")
            MONITORING.register_callback(TOOL, MONITORING.events.PY_START, self.on_start)
        MONITORING.set_events(TOOL, MONITORING.events.PY_START)
        MONITORING.restart_events()

    def on_start(self, code, offset):
        self.codes.add(code)
        return MONITORING.DISABLE

    def stop_monitoring(self):
        MONITORING.set_events(TOOL, 0)

    def start_tracing(self):
        threading.settrace(self.on_call)
        sys.settrace(self.on_call)

    def on_call(self, frame, event, argument):
        self.codes.add(frame.f_code)

    def stop_tracing(self):
        sys.settrace(None)
        threading.settrace(None)
