"""A relay of frames between a learner and an engine, which tells what passes: a part of benchmarks.fleet."""

import asyncio
import contextlib
import functools
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from composer_jax.frames import PREFIX

Watch = Callable[[int, bool, dict[str, Any], int], None]
"""(number of the connection, whether the learner sent it, header, bytes of the whole frame) of a frame."""


@contextlib.asynccontextmanager
async def relaying(
    port: int, to_port: int, watch: Watch, on_end: Callable[[int], None] = lambda connection: None
) -> AsyncIterator[int]:
    """Relays connections at a port of this machine to another one while the block runs; yields the port.

    A connection that cannot be made ends at once, and so do both sides of one that breaks.

    Args:
      port: where learners connect; 0 takes a free one.
      watch: called before a frame is passed on.
      on_end: called with the number of a connection that has ended, of which no further frame comes.
    """
    connections: set[asyncio.Task[None]] = set()
    numbers = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        others: list[asyncio.StreamWriter] = []
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", to_port)
            others.append(to_writer)
            number = next(numbers)
            of_connection = functools.partial(watch, number)
            ways = [
                asyncio.create_task(_pass_on(reader, to_writer, functools.partial(of_connection, True))),
                asyncio.create_task(_pass_on(to_reader, writer, functools.partial(of_connection, False))),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                on_end(number)
        except (OSError, asyncio.CancelledError):
            return
        finally:
            connections.discard(task)
            for one in (writer, *others):
                one.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(connections):
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, watch: Callable[[dict[str, Any], int], None]
) -> None:
    """Passes frames on until one side ends."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            prefix = await reader.readexactly(PREFIX.size)
            n_text, n_content = PREFIX.unpack(prefix)
            text, content = await reader.readexactly(n_text), await reader.readexactly(n_content)
            watch(json.loads(text), len(prefix) + n_text + n_content)
            writer.write(b"".join((prefix, text, content)))
            await writer.drain()
