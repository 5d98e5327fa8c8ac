"""Router of a canary: a reverse proxy in front of two servers, which sends each user to the arm of the open release.

A user is X-User-ID, or the API key without one; a request with neither goes to the anchor. Answers stream through as
they come, and a client that goes away ends its request at the server, too. The server gets the arm as the header X-Arm,
and the client as well. GET /arms says what both servers did in the last minutes, which `canary.look` needs.

A session (X-Session-ID) stays with the server of its first request while a canary is open, also when the fraction
rises: each server has a traffic folder of its own. POST /events, whose sender is often no user of the model, goes to
the other server when the first one answers 404.

HAProxy does the same without the release file; docs/realtime_release.md has its configuration.
"""

import asyncio
import collections
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from composer_jax.errors import UserError
from composer_jax.realtime.release.canary import Arm, ServiceSample, arm_of
from composer_jax.realtime.release.releases import FOLDER, read_releases

WINDOW_S = 300.0
"""Seconds of requests that GET /arms counts."""
MOST_SAMPLES = 100_000
"""Requests of the window that are kept per arm; beyond it, the newest ones."""
MOST_SESSIONS = 100_000
"""Sessions whose server is remembered; beyond it, those with the newest requests."""
OTHER: Mapping[Arm, Arm] = {"anchor": "candidate", "candidate": "anchor"}
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
SINGLE = ("X-User-ID", "X-Consent", "X-Session-ID", "Authorization")
"""Headers that may be sent once: of two, the router and the server might read different ones."""
IDLE_S = 4.0
"""Seconds that a connection to a server may idle; less than uvicorn's 5, after which the server closes it."""
MOST_BODY = 64 << 20
"""Bytes of a request; the servers have limits of their own."""


class Split(NamedTuple):
    """What the file of the last release says of its arms."""

    release: int
    salt: str
    fraction: float
    """0 while it is being rolled back."""

    @property
    def is_open(self) -> bool:
        """Whether users have different arms."""
        return 0 < self.fraction < 1


class _Sample(NamedTuple):
    """One request of a server."""

    at: float
    status: int
    """499 of a client that went away, which is not an error of the server."""
    seconds: float
    is_model: bool
    """Whether the model was to answer."""


class ArmRouter:
    """Assigns users to arms and passes their requests on.

    Args:
      workdir: its releases/ say which release is open; the last file is read again when it changes.
      servers: address of the server of each arm.
      monotonic: the clock of latencies.

    Raises UserError for a damaged release.
    """

    def __init__(
        self, workdir: str | Path, servers: Mapping[Arm, str], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        read_releases(workdir)
        self._folder, self._monotonic = Path(workdir).expanduser() / FOLDER, monotonic
        self._servers = {arm: address.rstrip("/") for arm, address in servers.items()}
        self._stamp, self._split = self._newest(), self._read(self._newest())
        self._samples: dict[Arm, collections.deque[_Sample]]
        self._samples = {arm: collections.deque(maxlen=MOST_SAMPLES) for arm in servers}
        self._sessions: collections.OrderedDict[bytes, tuple[int, Arm]] = collections.OrderedDict()
        """Hash of a session -> the release in which it had its last request, and the arm whose server got it."""

    def arm(self, user: str) -> Arm:
        """Returns the arm of a user in the open canary; the anchor outside one."""
        if not user or self._split is None or not self._split.is_open:
            return "anchor"
        return arm_of(self._split.salt, user, self._split.fraction)

    def app(self) -> web.Application:
        """Returns the web application."""
        app = web.Application(client_max_size=MOST_BODY)
        app.cleanup_ctx.append(self._session)
        app.router.add_get("/arms", self._arms)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    def runner(self, **options: Any) -> web.AppRunner:
        """Returns what serves the application, which passes compressed bodies on as they are."""
        return web.AppRunner(self.app(), auto_decompress=False, handler_cancellation=True, access_log=None, **options)

    def summary(self) -> dict[str, ServiceSample]:
        """Returns what each arm's server did within WINDOW_S; an error is a status of 500 or more, or no answer."""
        since, summary = self._monotonic() - WINDOW_S, {}
        for arm, samples in self._samples.items():
            recent = [one for one in samples if one.at >= since]
            latencies = sorted(
                one.seconds for one in recent if one.is_model and (one.status < 400 or one.status == 499)
            )
            p95 = latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))] if latencies else 0.0
            errors = sum(one.status >= 500 for one in recent)
            summary[arm] = ServiceSample(len(recent), errors, len(latencies), p95)
        return summary

    def _newest(self) -> tuple[Path, int, int] | None:
        """Returns the file of the last release with what changes when it is replaced; None without a release."""
        files = sorted(self._folder.glob("[0-9]*.json"))[-1:]
        return next(((file, (stat := file.stat()).st_mtime_ns, stat.st_ino) for file in files), None)

    @staticmethod
    def _read(stamp: tuple[Path, int, int] | None) -> Split | None:
        if stamp is None:
            return None
        row = json.loads(stamp[0].read_bytes())
        return Split(row["number"], row["salt"], 0.0 if row["rollback"] else row["fraction"])

    async def _refresh(self) -> None:
        """Reads the last release if its file has changed. A damaged file changes nothing, and stderr has the reason."""
        if (stamp := self._newest()) == self._stamp:
            return
        self._stamp = stamp
        try:
            split = await asyncio.to_thread(self._read, stamp)
        except (OSError, ValueError, KeyError, TypeError) as error:
            file = stamp[0] if stamp else self._folder
            print(f"{file} is not the file of a release ({error}); the arms stay.", file=sys.stderr, flush=True)
            return
        if self._stamp == stamp:  # no other request has read a newer file meanwhile
            self._split = split

    async def _session(self, app: web.Application) -> AsyncIterator[None]:
        del app
        # Without a limit of connections or time: the servers have both.
        connector, timeout = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self._client:
            yield

    async def _arms(self, request: web.Request) -> web.Response:
        del request
        await self._refresh()
        shown = None if self._split is None else {"release": self._split.release, "fraction": self._split.fraction}
        return web.json_response(
            {"release": shown, "arms": {arm: sample._asdict() for arm, sample in self.summary().items()}}
        )

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if twice := [name for name in SINGLE if len(request.headers.getall(name, ())) > 1]:
            return _error(400, f"the header {twice[0]} is sent more than once.")
        await self._refresh()
        arm, body = self._arm_of(request), await request.read()
        is_events = request.method == "POST" and request.path == "/events"
        return await self._ask(request, body, arm, OTHER[arm] if is_events else None)

    def _arm_of(self, request: web.Request) -> Arm:
        """Returns the arm whose server gets a request: in an open canary, the one that its session has."""
        arm, session = self.arm(_user(request)), request.headers.get("X-Session-ID")
        if not session:
            return arm
        release, is_open = (self._split.release, self._split.is_open) if self._split else (0, False)
        owned = f"{request.headers.get('Authorization', '')}\n{session}"  # a session belongs to a key
        name = hashlib.sha256(owned.encode("utf-8", "surrogateescape")).digest()
        if (before := self._sessions.pop(name, None)) and is_open:
            arm = before[1] if before[0] == release else "anchor"  # it began before this canary
        self._sessions[name] = release, arm
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return arm

    async def _ask(self, request: web.Request, body: bytes, arm: Arm, other: Arm | None = None) -> web.StreamResponse:
        """Passes a request on to an arm's server and its answer back, or the request to `other` if that is a 404."""
        response = web.StreamResponse()
        began, status = self._monotonic(), 499
        try:
            async with self._client.request(
                request.method,
                URL(self._servers[arm] + request.rel_url.raw_path_qs, encoded=True),  # as the client wrote it
                headers=_request_headers(request, arm),
                data=body or None,
                allow_redirects=False,
            ) as answer:
                status = answer.status
                if other is None or status != 404:
                    await _stream(request, answer, arm, response)
                    return response
        except aiohttp.ClientError as error:
            if request.transport is None or request.transport.is_closing():
                raise
            status = 502
            if not response.prepared:
                return _error(status, f"the server of the arm {arm} does not answer: {error}.")
            request.transport.close()  # the client must not take a part for the whole
            return response
        finally:
            now, is_model = self._monotonic(), request.method == "POST" and request.path.startswith("/v1/")
            self._samples[arm].append(_Sample(now, status, now - began, is_model))
        return await self._ask(request, body, other)


async def _stream(request: web.Request, answer: aiohttp.ClientResponse, arm: Arm, response: web.StreamResponse) -> None:
    """Sends an answer on as `response`, part by part as the parts come."""
    response.set_status(answer.status, answer.reason)
    for name, value in answer.headers.items():
        if _passes(name, answer.headers):
            response.headers.add(name, value)
    response.headers["X-Arm"] = arm
    await response.prepare(request)
    async for part in answer.content.iter_any():
        await response.write(part)
    await response.write_eof()


def _request_headers(request: web.Request, arm: Arm) -> CIMultiDict[str]:
    """Returns what the server gets; the length of the body is set again with the body."""
    own = ("host", "x-arm", "content-length")
    headers = CIMultiDict(
        (name, value)
        for name, value in request.headers.items()
        if _passes(name, request.headers) and name.lower() not in own
    )
    headers.update({"Host": request.host, "X-Arm": arm})
    return headers


def _error(status: int, message: str) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return web.json_response({"error": {"message": message, "type": kind}}, status=status)


def _user(request: web.Request) -> str:
    return request.headers.get("X-User-ID") or request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


def _passes(name: str, headers: Mapping[str, str]) -> bool:
    """Whether a header goes from one connection to the next."""
    listed = {part.strip().lower() for part in headers.get("Connection", "").split(",")}
    return name.lower() not in HOP_BY_HOP | listed


def route(workdir: str | Path, anchor: str, candidate: str, host: str, port: int) -> None:
    """Routes until SIGINT or SIGTERM. Raises UserError for addresses or a port that cannot be used."""
    for address in (anchor, candidate):
        if not address.startswith(("http://", "https://")):
            raise UserError(f"{address} is not the address of a server; use one such as http://127.0.0.1:8001.")
    router = ArmRouter(workdir, {"anchor": anchor, "candidate": candidate})

    async def run() -> None:
        runner = router.runner(handle_signals=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            print(
                f"routes on http://{host}:{runner.addresses[0][1]}/ to {anchor} and {candidate}",
                file=sys.stderr,
                flush=True,
            )
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    try:
        asyncio.run(run())
    except web.GracefulExit:
        return
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port} ({error}); use another --port or --host.") from error
