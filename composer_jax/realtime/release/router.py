"""Router of a canary: a reverse proxy in front of two servers, which sends each user to the arm of the open release.

A user is X-User-ID, or the API key without one. Answers stream through as they come, and a client that goes away ends
its request at the server, too. The server gets the arm as the header X-Arm, and the client as well. GET /arms says what
both servers did in the last minutes, which `canary.look` needs.

HAProxy does the same without the release file; docs/realtime.md has its configuration.
"""

import asyncio
import collections
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

from composer_jax.errors import UserError
from composer_jax.realtime.release.canary import Arm, ServiceSample, arm_of
from composer_jax.realtime.release.releases import FOLDER, Release, read_releases

WINDOW_S = 300.0
"""Seconds of requests that GET /arms counts."""
MOST_SAMPLES = 100_000
"""Requests of the window that are kept per arm; beyond it, the newest ones."""
HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailers",
    "transfer-encoding",
    "upgrade",
}
"""Headers of one connection (RFC 9110, section 7.6.1), which a proxy does not pass on."""
MOST_BODY = 64 << 20
"""Bytes of a request; the servers have limits of their own."""


class ArmRouter:
    """Assigns users to arms and passes their requests on.

    Args:
      workdir: its releases/ say which release is open; they are read again when they change.
      servers: address of the server of each arm.
      monotonic: the clock of latencies.
    """

    def __init__(
        self, workdir: str | Path, servers: Mapping[Arm, str], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._workdir, self._monotonic = Path(workdir).expanduser() / FOLDER, workdir, monotonic
        self._servers = {arm: address.rstrip("/") for arm, address in servers.items()}
        self._seen: tuple[int, ...] = ()
        self._release: Release | None = None
        self._samples = {arm: collections.deque(maxlen=MOST_SAMPLES) for arm in servers}

    def arm(self, user: str) -> Arm:
        """Returns the arm of a user in the open canary; the anchor outside one."""
        release = self._read_release()
        if release is None or not 0 < release.fraction < 1 or release.rollback is not None:
            return "anchor"
        return arm_of(release.salt, user, release.fraction)

    def app(self) -> web.Application:
        """Returns the web application."""
        app = web.Application(client_max_size=MOST_BODY)
        app.cleanup_ctx.append(self._session)
        app.router.add_get("/arms", self._arms)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    def summary(self) -> dict[str, ServiceSample]:
        """Returns what each arm's server did within WINDOW_S; an error is a status of 500 or more, or no answer."""
        since, summary = self._monotonic() - WINDOW_S, {}
        for arm, samples in self._samples.items():
            recent = [(status, seconds) for at, status, seconds in samples if at >= since]
            latencies = sorted(seconds for status, seconds in recent if status < 500)
            p95 = latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))] if latencies else 0.0
            summary[arm] = ServiceSample(len(recent), sum(status >= 500 for status, _ in recent), p95)
        return summary

    def _read_release(self) -> Release | None:
        """Returns the last release; its file is read when it or the list of files has changed."""
        files = sorted(self._folder.glob("[0-9]*.json"))[-1:]
        seen = tuple(number for file in files for number in (file.stat().st_mtime_ns, file.stat().st_ino))
        if seen != self._seen:
            releases = read_releases(self._workdir)
            self._release, self._seen = (releases[-1] if releases else None), seen
        return self._release

    async def _session(self, app: web.Application) -> AsyncIterator[None]:
        del app
        # Without a limit of connections or time: the servers have both.
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self._client:
            yield

    async def _arms(self, request: web.Request) -> web.Response:
        del request
        release = self._read_release()
        shown = None if release is None else {"release": release.number, "fraction": release.fraction}
        return web.json_response(
            {"release": shown, "arms": {arm: sample._asdict() for arm, sample in self.summary().items()}}
        )

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        arm = self.arm(_user(request))
        headers = {name: value for name, value in request.headers.items() if _passes(name, request.headers)}
        headers = {name: value for name, value in headers.items() if name.lower() not in ("host", "x-arm")}
        headers |= {"Host": request.host, "X-Arm": arm}
        began, status = self._monotonic(), 499  # of a client that goes away, which is no error of the server
        try:
            body = await request.read()
            url = f"{self._servers[arm]}{request.raw_path}"
            async with self._client.request(
                request.method, _url(url), headers=headers, data=body or None, allow_redirects=False
            ) as answer:
                status = answer.status
                return await _stream(request, answer, arm)
        except aiohttp.ClientError as error:
            status = 502
            message = f"the server of the arm {arm} does not answer: {error}."
            if request.transport is None or request.transport.is_closing():
                raise
            return web.json_response({"error": {"message": message, "type": "server_error"}}, status=status)
        finally:
            self._samples[arm].append((self._monotonic(), status, self._monotonic() - began))


async def _stream(request: web.Request, answer: aiohttp.ClientResponse, arm: Arm) -> web.StreamResponse:
    """Sends an answer on, part by part as the parts come."""
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in answer.headers.items():
        if _passes(name, answer.headers):
            response.headers.add(name, value)
    response.headers["X-Arm"] = arm
    await response.prepare(request)
    async for part in answer.content.iter_any():
        await response.write(part)
    await response.write_eof()
    return response


def _user(request: web.Request) -> str:
    return request.headers.get("X-User-ID") or request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


def _passes(name: str, headers: Mapping[str, str]) -> bool:
    """Whether a header goes from one connection to the next."""
    listed = {part.strip().lower() for part in headers.get("Connection", "").split(",")}
    return name.lower() not in HOP_BY_HOP | listed


def _url(url: str) -> URL:
    return URL(url, encoded=True)  # the path as the client wrote it


def route(workdir: str | Path, anchor: str, candidate: str, host: str, port: int) -> None:
    """Routes until SIGINT or SIGTERM. Raises UserError for addresses or a port that cannot be used."""
    for address in (anchor, candidate):
        if not address.startswith(("http://", "https://")):
            raise UserError(f"{address} is not the address of a server; use one such as http://127.0.0.1:8001.")
    router = ArmRouter(workdir, {"anchor": anchor, "candidate": candidate})
    router.arm("")  # a damaged release is an error at the start

    async def run() -> None:
        runner = web.AppRunner(router.app(), handle_signals=True, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            print(f"routes on http://{host}:{port}/ to {anchor} and {candidate}", file=sys.stderr, flush=True)
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    try:
        asyncio.run(run())
    except web.GracefulExit:
        return
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port} ({error}); use another --port or --host.") from error
