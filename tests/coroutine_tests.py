"""Tests that are coroutine functions: a hook which the conftest of their room imports."""

import asyncio
import contextlib
import inspect

import pytest


async def call(function, arguments: dict) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for name, value in arguments.items():
            if inspect.isasyncgen(value):
                stack.push_async_callback(value.aclose)
                arguments[name] = await anext(value)
        await function(**arguments)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs the test in an event loop of its own. Of a fixture that is an async generator it gets what this yields."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(call(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names}))
    return True
