"""The router: sticky arms, streams as they come, disconnects that reach the server, and what it counts."""

import asyncio
import json

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from composer_jax.checkpoint.weight_chain import Shard, WeightPublisher
from composer_jax.errors import UserError
from composer_jax.realtime.release.canary import arm_of
from composer_jax.realtime.release.releases import ReleaseFolder
from composer_jax.realtime.release.router import ArmRouter, route
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

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/stream", self._stream)
        app.router.add_route("*", "/{path:.*}", self._echo)
        return app

    async def _echo(self, request: web.Request) -> web.Response:
        got = {"arm": request.headers["X-Arm"], "path": request.raw_path, "body": await request.text()}
        return web.json_response(got, status=int(request.headers.get("X-Status", 200)))

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

        async def start(app) -> str:
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return f"http://127.0.0.1:{runner.addresses[0][1]}"

        server = await start(backend.app())
        router = ArmRouter(tmp_path, {"anchor": server, "candidate": server})
        address = await start(router.app())
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


def test_errors_and_latency_are_counted_by_arm(tmp_path, release):
    users = {arm_of(release.salt, str(i), 0.5): str(i) for i in range(99)}

    async def test(client, backend, router):
        del backend
        for status in (200, 404, 500, 503):
            headers = {"X-User-ID": users["candidate"], "X-Status": str(status)}
            async with client.get("/", headers=headers) as answer:
                assert answer.status == status
        async with client.get("/arms") as answer:
            arms = (await answer.json())["arms"]
        assert (arms["candidate"]["requests"], arms["candidate"]["errors"], arms["anchor"]["requests"]) == (4, 2, 0)
        assert arms["candidate"]["p95_s"] > 0
        router._servers = {"anchor": "http://127.0.0.1:1", "candidate": "http://127.0.0.1:1"}
        async with client.get("/", headers={"X-User-ID": users["anchor"]}) as answer:
            assert answer.status == 502 and "does not answer" in json.dumps(await answer.json())
        assert router.summary()["anchor"].errors == 1

    routed(tmp_path, test)


def test_without_a_release_all_users_have_the_anchor(tmp_path):
    assert ArmRouter(tmp_path, {}).arm("a") == "anchor"


def test_addresses_that_are_none(tmp_path):
    with pytest.raises(UserError, match="localhost:1 is not the address of a server"):
        route(tmp_path, "localhost:1", "http://a", "127.0.0.1", 0)
    assert "route" in traffic.COMMANDS
