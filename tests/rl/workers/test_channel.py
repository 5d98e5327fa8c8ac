"""Channel and handshake over TCP: calls, cancellation, heartbeats, and strangers."""

import asyncio
import contextlib
import os
import stat

import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.frames import FrameError, encode_frame, read_frame
from composer_jax.rl.workers import handshake
from composer_jax.rl.workers.channel import Channel, ChannelClosed, RemoteError
from composer_jax.rl.workers.handshake import ENGINES, WORKERS, HandshakeError, accept, join, make_token, read_token

TOKEN = "a token of the tests"


@contextlib.asynccontextmanager
async def connection():
    """Yields (reader, writer) of both ends."""
    accepted = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda *ends: accepted.set_result(ends), "127.0.0.1", 0)
    near = await asyncio.open_connection(*server.sockets[0].getsockname())
    far = await accepted
    yield near, far
    server.close()
    for _, writer in (near, far):
        writer.close()


@contextlib.asynccontextmanager
async def channels(handlers, **options):
    async with connection() as (near, far):
        ends = Channel(*near, {}, **options), Channel(*far, handlers, **options)
        running = [asyncio.create_task(end.run()) for end in ends]
        yield ends
        ends[0].close("the test is over")
        await asyncio.gather(*running)


async def test_calls_overlap_and_each_gets_its_reply():
    gates = [asyncio.Event() for _ in range(4)]
    order = []

    async def wait(body, arrays):
        order.append(body["i"])
        await gates[body["i"]].wait()
        return {"i": body["i"]}, [2 * arrays[0]]

    async with channels({"wait": wait}) as (near, _):
        calls = [asyncio.create_task(near.call("wait", {"i": i}, [np.full(3, i)])) for i in range(4)]
        for i in (2, 0, 3, 1):
            gates[i].set()
            header, (array,) = await calls[i]
            assert header == {"i": i} and array.tolist() == [2 * i] * 3
    assert order == [0, 1, 2, 3]


async def test_errors_of_a_handler_reach_the_caller_only():
    async def fail(body, arrays):
        raise UserError("use another") if body["user"] else ZeroDivisionError("oh")

    async with channels({"fail": fail}) as (near, _):
        with pytest.raises(UserError, match="^use another$"):
            await near.call("fail", {"user": True})
        with pytest.raises(RemoteError, match="^ZeroDivisionError: oh$"):
            await near.call("fail", {"user": False})
        with pytest.raises(RemoteError, match="KeyError: 'missing'"):
            await near.call("missing", {})
        assert near.reason == ""


def waiting_handler():
    """Returns a handler that waits until it is cancelled, and the events of its beginning and its end."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def wait(body, arrays):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    return wait, began, ended


async def test_a_call_that_is_left_is_cancelled_at_the_other_end():
    wait, began, ended = waiting_handler()
    async with channels({"wait": wait}) as (near, _):
        call = asyncio.create_task(near.call("wait", {}))
        await began.wait()
        call.cancel()
        await asyncio.wait_for(ended.wait(), 10)


async def test_a_connection_that_breaks_ends_its_calls_and_handlers():
    wait, began, ended = waiting_handler()
    async with channels({"wait": wait}) as (near, far):
        call = asyncio.create_task(near.call("wait", {}))
        await began.wait()
        far.abort("a test broke it")
        with pytest.raises(ChannelClosed):
            await call
        with pytest.raises(ChannelClosed):
            await near.call("wait", {})
        await asyncio.wait_for(ended.wait(), 10)


async def test_heartbeats_keep_an_idle_channel_and_silence_ends_it():
    async with channels({}, silence_s=0.4) as (near, far):
        await asyncio.sleep(1.0)
        assert near.reason == far.reason == ""
    async with connection() as (near, _):  # nobody reads or writes at the other end
        channel = Channel(*near, {}, silence_s=0.4)
        running = asyncio.create_task(channel.run())
        with pytest.raises(ChannelClosed):
            await channel.call("wait", {}, [np.zeros(10_000_000)])  # more than the buffers of TCP hold
        assert await asyncio.wait_for(running, 10) == "nothing came for 0.4 s"


@pytest.mark.parametrize(
    "sent",
    [b"\xff" * 100, encode_frame({"neither": "call"}), encode_frame({"call": 1})],
    ids=["no frame", "no kind", "no method"],
)
async def test_what_is_no_message_ends_the_channel(sent):
    async with connection() as (near, (_, writer)):
        writer.write(sent)
        assert (await asyncio.wait_for(Channel(*near, {}).run(), 10)).startswith("the other end sent")


def shake(trainer_token, worker_token):
    async def main():
        async with connection() as (near, far):
            accepting = accept(*far, trainer_token, WORKERS, {"setup": 1})
            return await asyncio.gather(
                accepting, join(*near, worker_token, WORKERS, {"name": "w"}), return_exceptions=True
            )

    return asyncio.run(main())


def test_both_ends_know_the_token_or_the_worker_is_refused():
    assert shake(TOKEN, TOKEN) == [{"name": "w"}, {"setup": 1}]
    trainer, worker = shake(TOKEN, TOKEN + "!")
    assert isinstance(trainer, HandshakeError) and "does not know the token" in str(trainer)
    assert isinstance(worker, HandshakeError) and "refuses this worker" in str(worker)


@pytest.mark.parametrize("answer", [{}, {"challenge": "c"}, {"challenge": "c", "proof": ""}, {"proof": "x" * 64}])
def test_a_stranger_gets_nothing_of_the_run(answer):
    async def main():
        async with connection() as ((reader, writer), far):
            accepting = asyncio.create_task(accept(*far, TOKEN, WORKERS, {"secret": 1}))
            await read_frame(reader)
            writer.write(encode_frame(answer))
            with pytest.raises(HandshakeError):
                await accepting
            far[1].close()
            return await reader.read()

    assert b"secret" not in asyncio.run(main())


async def test_a_stranger_that_sends_the_proof_back_is_refused():
    """The trainer's proof is made from the same challenges as the worker's, but not for the same role."""
    async with connection() as (near, far):
        joining = asyncio.create_task(join(*near, TOKEN, WORKERS, {}))
        far[1].write(encode_frame({"protocol": handshake.PROTOCOL, "challenge": "c"}))
        header, _ = await read_frame(far[0])
        far[1].write(encode_frame({"proof": header["proof"]}))
        with pytest.raises(HandshakeError):
            await joining


async def test_a_worker_is_no_learner_though_it_knows_the_token():
    async with connection() as (near, far):
        accepting = accept(*far, TOKEN, ENGINES, {})
        engine, worker = await asyncio.gather(accepting, join(*near, TOKEN, WORKERS, {}), return_exceptions=True)
    assert isinstance(engine, HandshakeError) and "refuses this worker" in str(worker)


async def test_a_large_frame_of_a_stranger_is_not_read():
    async with connection() as ((reader, writer), far):
        writer.write(encode_frame({"challenge": "c" * 5000}))
        with pytest.raises(FrameError):
            await accept(*far, TOKEN, WORKERS, {})


async def test_a_stranger_that_says_nothing_is_left(monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.1)
    async with connection() as (_, far):
        with pytest.raises(TimeoutError):
            await accept(*far, TOKEN, WORKERS, {})


async def test_a_trainer_of_another_version():
    async with connection() as (near, far):
        far[1].write(encode_frame({"protocol": 0, "challenge": "c"}))
        with pytest.raises(HandshakeError, match="version 0"):
            await join(*near, TOKEN, WORKERS, {})


def test_the_file_of_a_token(tmp_path):
    path = tmp_path / "token"
    token = make_token(path)
    assert len(token) == 64 and token == make_token(path) == read_token(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    path.write_text("short\n")
    missing = tmp_path / "missing"
    for call, word in (
        (lambda: make_token(path), "5 characters"),
        (lambda: read_token(missing), "cannot be read"),
        (lambda: make_token(missing / "token"), "cannot be written"),
    ):
        with pytest.raises(UserError, match=word):
            call()
