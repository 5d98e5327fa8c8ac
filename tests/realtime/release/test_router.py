"""The router: sticky arms, streams as they come, disconnects that reach the server, and what it counts."""

import asyncio
import gzip
import json
import time

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from composer_jax.checkpoint.weight_chain import Shard, WeightPublisher
from composer_jax.errors import UserError
from composer_jax.realtime.release import router as routing
from composer_jax.realtime.release.canary import arm_of
from composer_jax.realtime.release.releases import ReleaseFolder
from composer_jax.realtime.release.router import ArmRouter, route
from composer_jax.realtime.track.event_sender import queued_event, send_events
from launch import traffic


@pytest.fixture
def release(tmp_path):
    """A canary at one half of the users."""
    publisher = WeightPublisher(str(tmp_path / "weights"))
    for version in (1, 2):
        publisher.publish({Shard("w", (0,), (2,)): np.full(2, version, np.float32)}, version)
    with ReleaseFolder(tmp_path, by="test") as folder:
        folder.adopt(str(tmp_path / "weights"), 2, 1)
        folder.record_gate({"verdict": "pass", "reasons": []})
        return folder.move("canary", "", fraction=0.5)


class Backend:
    """A server that answers what it got, streams when the test says so, and notes clients that went away."""

    def __init__(self) -> None:
        self.go_on, self.gone = asyncio.Event(), asyncio.Event()
        self.stores, self.events = "", []
        """The arm whose server has stored a session, and bodies of its events."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/stream", self._stream)
        app.router.add_post("/die", self._die)
        app.router.add_post("/events", self._events)
        app.router.add_route("*", "/{path:.*}", self._echo)
        return app

    async def _echo(self, request: web.Request) -> web.Response:
        got = {"arm": request.headers["X-Arm"], "path": request.raw_path, "body": await request.text()}
        got |= {"languages": request.headers.getall("Accept-Language")} if "Accept-Language" in request.headers else {}
        return web.json_response(got, status=int(request.headers.get("X-Status", 200)))

    async def _events(self, request: web.Request) -> web.Response:
        if request.headers["X-Arm"] != self.stores:
            return web.json_response({"error": {"message": "no such session is stored"}}, status=404)
        self.events.append(await request.json())
        return web.json_response({"stored": 1})

    async def _die(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"the first part")
        assert request.transport is not None
        request.transport.close()
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await response.write(b"data: first\n\n")
            await self.go_on.wait()
            await response.write(b"data: second\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise
        return response


def routed(tmp_path, test):
    """Runs test(client session with the router's address, backend, router)."""

    async def run():
        backend = Backend()
        runners = []

        async def start(runner) -> str:
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return f"http://127.0.0.1:{runner.addresses[0][1]}"

        server = await start(web.AppRunner(backend.app(), handler_cancellation=True))
        router = ArmRouter(tmp_path, {"anchor": server, "candidate": server})
        address = await start(router.runner())
        try:
            async with aiohttp.ClientSession(address) as client:
                await asyncio.wait_for(test(client, backend, router), 30)
        finally:
            for runner in reversed(runners):
                await runner.cleanup()

    asyncio.run(run())


def test_a_user_has_one_arm_which_server_and_client_learn(tmp_path, release):
    async def test(client, backend, router):
        del backend, router
        for i in range(20):
            for _ in range(2):
                headers = {"X-User-ID": f"u{i}", "X-Arm": "forged"}
                async with client.post(f"/v1/a%2Fb?x={i}", data="body", headers=headers) as answer:
                    got = await answer.json()
                    arm = arm_of(release.salt, f"u{i}", 0.5)
                    assert got == {"arm": arm, "path": f"/v1/a%2Fb?x={i}", "body": "body"}
                    assert answer.headers["X-Arm"] == arm
        async with client.get("/", headers={"Authorization": "Bearer key"}) as answer:
            assert answer.headers["X-Arm"] == arm_of(release.salt, "key", 0.5)

    routed(tmp_path, test)


def test_a_rollback_reaches_the_router_with_the_next_request(tmp_path, release):
    user = next(str(i) for i in range(99) if arm_of(release.salt, str(i), 0.5) == "candidate")

    async def test(client, backend, router):
        del backend
        assert router.arm(user) == "candidate"
        with ReleaseFolder(tmp_path, by="test") as folder:
            folder.roll_back("test")
        async with client.get("/", headers={"X-User-ID": user}) as answer:
            assert answer.headers["X-Arm"] == "anchor"

    routed(tmp_path, test)


def test_a_stream_comes_as_it_is_sent(tmp_path, release):
    async def test(client, backend, router):
        del router
        async with client.post("/stream") as answer:
            assert await answer.content.readany() == b"data: first\n\n"
            backend.go_on.set()
            assert await answer.content.readany() == b"data: second\n\n"

    routed(tmp_path, test)


def test_a_client_that_goes_away_ends_its_request_at_the_server(tmp_path, release):
    async def test(client, backend, router):
        async with client.post("/stream") as answer:
            await answer.content.readany()
            answer.close()
        await backend.gone.wait()
        assert all(sample.errors == 0 for sample in router.summary().values())

    routed(tmp_path, test)


async def arm_of_request(client, user, session, key="key") -> str:
    headers = {"X-User-ID": user, "X-Session-ID": session, "Authorization": f"Bearer {key}"}
    async with client.post("/v1/chat/completions", headers=headers) as answer:
        return answer.headers["X-Arm"]


def test_an_open_session_stays_with_its_server(tmp_path, release):
    def arms(salt, user):
        return [arm_of(salt, user, fraction) for fraction in (0.05, 0.5)]

    user = next(str(i) for i in range(99) if arms(release.salt, str(i)) == ["anchor", "candidate"])

    async def test(client, backend, router):
        del backend
        with ReleaseFolder(tmp_path, by="test") as folder:
            folder.move("canary", "", fraction=0.05)
            assert await arm_of_request(client, user, "one") == "anchor"
            folder.move("canary", "", fraction=0.5)
            assert await arm_of_request(client, user, "one") == "anchor", "its first part is with the anchor's server"
            assert await arm_of_request(client, user, "two") == "candidate"
            assert await arm_of_request(client, user, "one", key="other") == "candidate", "another client's session"
            folder.roll_back("test")
            assert await arm_of_request(client, user, "two") == "anchor", "nobody stays with a candidate that goes"
            WeightPublisher(str(tmp_path / "weights")).publish({Shard("w", (0,), (2,)): np.zeros(2, np.float32)}, 9)
            folder.adopt(str(tmp_path / "weights"), 9)
            folder.record_gate({"verdict": "pass", "reasons": []})
            salt = folder.move("canary", "", fraction=0.5).salt
        other = next(str(i) for i in range(99) if arms(salt, str(i))[1] == "candidate")
        assert await arm_of_request(client, other, "two") == "anchor", "it began before this canary"
        assert await arm_of_request(client, other, "three") == "candidate"

    routed(tmp_path, test)


def test_sessions_that_are_remembered_have_a_limit(tmp_path, release, monkeypatch):
    monkeypatch.setattr(routing, "MOST_SESSIONS", 3)

    async def test(client, backend, router):
        del backend
        for i in range(9):
            await arm_of_request(client, "user", f"s{i}")
        assert len(router._sessions) == 3

    routed(tmp_path, test)


def test_events_find_the_server_that_has_their_session(tmp_path, release):
    """The client that measures kept lines sends no user."""

    async def test(client, backend, router):
        del router
        event = queued_event("s", "session_closed", "", time.time(), {"reason": "user"}, 0.0)
        address = str(client._base_url).rstrip("/")
        for stores in ("anchor", "candidate"):
            backend.stores = stores
            await asyncio.to_thread(lambda: list(send_events(address, "key", [event], time.time())))
        assert [body["events"][0]["id"] for body in backend.events] == [event.id, event.id]
        backend.stores = ""
        with pytest.raises(UserError, match="does not know session 's'"):
            await asyncio.to_thread(lambda: list(send_events(address, "key", [event], time.time())))

    routed(tmp_path, test)


def test_errors_and_latency_are_counted_by_arm(tmp_path, release):
    users = {arm_of(release.salt, str(i), 0.5): str(i) for i in range(99)}

    async def test(client, backend, router):
        del backend
        for status in (200, 404, 500, 503):
            headers = {"X-User-ID": users["candidate"], "X-Status": str(status)}
            async with client.post("/v1/completions", headers=headers) as answer:
                assert answer.status == status
        async with client.get("/health", headers={"X-User-ID": users["candidate"]}) as answer:
            assert answer.status == 200
        async with client.get("/arms") as answer:
            arms = (await answer.json())["arms"]
        assert arms["candidate"].pop("p95_s") > 0 and arms["anchor"]["requests"] == 0
        assert arms["candidate"] == {"requests": 5, "errors": 2, "answered": 1}, "one answer of the model"
        router._servers = {"anchor": "http://127.0.0.1:1", "candidate": "http://127.0.0.1:1"}
        async with client.get("/", headers={"X-User-ID": users["anchor"]}) as answer:
            assert answer.status == 502 and "does not answer" in json.dumps(await answer.json())
        assert router.summary()["anchor"].errors == 1

    routed(tmp_path, test)


def test_a_server_that_dies_in_its_answer_cuts_the_answer_off(tmp_path, release):
    async def test(client, backend, router):
        del backend
        with pytest.raises(aiohttp.ClientPayloadError):
            async with client.post("/die") as answer:
                assert answer.status == 200
                await answer.read()
        assert router.summary()["anchor"].errors == 1

    routed(tmp_path, test)


def test_a_server_that_dies_in_its_answer_sends_no_second_one(tmp_path, release):
    async def test(client, backend, router):
        del backend, router
        got = await send_raw(client, "POST /die HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
        assert got.count(b"HTTP/1.1 ") == 1 and b"the first part" in got and not got.endswith(b"0\r\n\r\n")

    routed(tmp_path, test)


async def send_raw(client, request: str) -> bytes:
    """Returns all bytes of the answer to a request as it stands."""
    address = client._base_url
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(request.encode())
    got = await reader.read()
    writer.close()
    return got


@pytest.mark.parametrize("name", ["X-User-ID", "X-Consent", "X-Session-ID", "authorization"])
def test_a_header_that_two_readers_could_read_differently_is_refused(tmp_path, release, name):
    async def test(client, backend, router):
        del backend
        async with client.get("/", headers=[(name, "a"), (name, "b")]) as answer:
            assert answer.status == 400 and "sent more than once" in await answer.text()
        async with client.get("/", headers=[("Accept-Language", "de"), ("Accept-Language", "en")]) as answer:
            assert (await answer.json())["languages"] == ["de", "en"]
        assert sum(sample.requests for sample in router.summary().values()) == 1

    routed(tmp_path, test)


def test_a_compressed_body_arrives_as_it_was_sent(tmp_path, release):
    async def test(client, backend, router):
        del backend, router
        text = "a long body " * 100
        async with client.post("/", data=gzip.compress(text.encode()), headers={"Content-Encoding": "gzip"}) as answer:
            assert (await answer.json())["body"] == text

    routed(tmp_path, test)


@pytest.mark.parametrize(("target", "status"), [("http://elsewhere/x?y=%2F", 200), ("*", 404)])
def test_a_request_names_a_path_at_the_server(tmp_path, release, target, status):
    async def test(client, backend, router):
        del backend, router
        got = await send_raw(client, f"OPTIONS {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert got.startswith(f"HTTP/1.1 {status} ".encode()), got
        assert status != 200 or b'"path": "/x?y=%2F"' in got

    routed(tmp_path, test)


def test_a_request_without_a_name_goes_to_the_anchor(tmp_path, release):
    salt = next(str(i) for i in range(99) if arm_of(f"salt{i}", "", 0.5) == "candidate")
    file = tmp_path / "releases" / "0001.json"
    file.write_text(file.read_text().replace(release.salt, f"salt{salt}"))
    assert ArmRouter(tmp_path, {}).arm("") == "anchor"


def test_a_damaged_release_leaves_the_arms_and_is_an_error_at_the_start(tmp_path, release, capfd):
    user = next(str(i) for i in range(99) if arm_of(release.salt, str(i), 0.5) == "candidate")
    file = tmp_path / "releases" / "0001.json"

    async def test(client, backend, router):
        del backend, router
        whole = file.read_text()
        for content, arm in ((whole[:99], "candidate"), ("{}", "candidate"), (whole.replace("0.5", "0.0"), "anchor")):
            file.unlink()
            file.write_text(content)
            async with client.get("/", headers={"X-User-ID": user}) as answer:
                assert (answer.status, answer.headers["X-Arm"]) == (200, arm)

    routed(tmp_path, test)
    assert f"{file} is not the file of a release" in capfd.readouterr().err
    file.write_text("{")
    with pytest.raises(UserError, match="0001.json is not the file of a release"):
        ArmRouter(tmp_path, {})


def test_without_a_release_all_users_have_the_anchor(tmp_path):
    assert ArmRouter(tmp_path, {}).arm("a") == "anchor"


def test_addresses_that_are_none(tmp_path):
    with pytest.raises(UserError, match="localhost:1 is not the address of a server"):
        route(tmp_path, "localhost:1", "http://a", "127.0.0.1", 0)
    assert "route" in traffic.COMMANDS
