"""EventStream: server-sent events to a client that may read slowly or leave."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from composer_jax.serve.chat_completions import event_text
from composer_jax.serve.errors import ApiError
from composer_jax.serve.service import Choice, Service

T = TypeVar("T")


class EventStream(Response):
    """Sends events as they come. A client that leaves, or takes nothing for too long, ends the stream at once."""

    def __init__(self, events: AsyncGenerator[str], choices: Sequence[Choice], reader_seconds: float) -> None:
        """choices: the requests behind the events, which end with the stream."""
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._events, self._choices, self._reader_seconds = events, choices, reader_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def take(body: bytes, more: bool) -> None:
            async with asyncio.timeout(self._reader_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        async def send_all() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with contextlib.aclosing(self._events) as events:
                try:
                    async for event in events:
                        await take(event.encode(), True)
                except ApiError as error:  # the status is sent already
                    await take(event_text(error.body()).encode(), True)
            await take(b"", False)

        try:
            with contextlib.suppress(TimeoutError):
                await unless_disconnected(receive, send_all())
        finally:  # events that were never asked for cannot end their requests
            for choice in self._choices:
                choice.handle.cancel()


async def unless_disconnected(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T | None:
    """Returns what `work` returns; cancels it and returns None when the client leaves. The body must have been read."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    leaving, working = asyncio.create_task(leave()), asyncio.create_task(work)
    try:
        await asyncio.wait([leaving, working], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


async def read_body(service: Service, request: Request) -> bytes:
    """Returns the body of a request. Raises ApiError if it is too large, or comes too slowly."""
    limits, parts, size = service.limits, [], 0
    try:
        async with asyncio.timeout(limits.reader_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limits.body_bytes:
                    raise service.context_error(f"the body is larger than {limits.body_bytes} bytes", status=413)
                parts.append(part)
    except TimeoutError as error:
        raise ApiError(f"the body took longer than {limits.reader_seconds:g} s; send it faster.", status=408) from error
    return b"".join(parts)
