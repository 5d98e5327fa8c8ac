"""Both ends of a command channel in one process, with a dictionary in place of the coordinator."""

import contextlib
import itertools
import queue
import socket
import threading

import numpy as np
import pytest

from composer_jax.errors import OtherProcessError
from composer_jax.parallel import command_channel
from composer_jax.parallel.command_channel import CommandLane, CommandReceiver, CommandSender

ARRAYS = [np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2], np.zeros((0, 4), np.float32), np.array(True)]


class Coordinator:
    def __init__(self):
        self.published: queue.Queue[str] = queue.Queue()

    def key_value_set(self, key: str, value: str) -> None:
        self.published.put(value)


@pytest.fixture
def coordinator(monkeypatch):
    coordinator = Coordinator()
    monkeypatch.setattr(command_channel, "coordinator_client", lambda: coordinator)
    monkeypatch.setattr(command_channel, "coordinator_address", lambda: "127.0.0.1:1")
    monkeypatch.setattr(command_channel, "wait_for_key", lambda key: coordinator.published.get(timeout=60))
    monkeypatch.setattr(command_channel, "CLOSE_S", 0.1)  # where both ends are closed by one thread
    monkeypatch.setattr(command_channel, "process_count", lambda: 2)
    monkeypatch.setattr(command_channel, "process_index", lambda: 1)
    monkeypatch.setattr(command_channel, "report_lost_process", lambda process: f"process {process} ended: lost")
    return coordinator


@contextlib.contextmanager
def connecting(errors: list[str] | None = None, **options):
    """A sender that waits for its receiver in a thread."""
    sender = CommandSender(lambda error: errors.append(str(error)) if errors is not None else None, **options)
    thread = threading.Thread(target=sender.connect)
    thread.start()
    try:
        yield sender, thread
    finally:
        sender.close()
        thread.join(60)
        assert not thread.is_alive()


def test_commands_and_replies_arrive_in_order(coordinator):
    with connecting() as (sender, thread), CommandReceiver() as receiver:
        thread.join(60)
        for number in range(3):
            sender.send({"number": number}, ARRAYS)
        commands = iter(receiver)
        for number in range(3):
            header, arrays = next(commands)
            assert header == {"number": number}
            for a, b in zip(arrays, ARRAYS, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape
                np.testing.assert_array_equal(a, b)
        receiver.reply({"text": "done"}, ARRAYS[:1])
        ((header, arrays),) = sender.collect()
        assert header == {"text": "done"}
        np.testing.assert_array_equal(arrays[0], ARRAYS[0])
        sender.close()
        assert list(commands) == []


def test_a_process_that_is_gone_is_reported_after_another_one_failed(coordinator, monkeypatch):
    lost, indices = [], itertools.chain([1, 2], itertools.repeat(1))
    monkeypatch.setattr(command_channel, "report_lost_process", lambda process: lost.append(process) or "lost")
    monkeypatch.setattr(command_channel, "process_count", lambda: 3)
    monkeypatch.setattr(command_channel, "process_index", lambda: next(indices))
    with connecting() as (sender, thread):
        address = coordinator.published.get(timeout=60)
        coordinator.published.put(address)
        first = CommandReceiver().__enter__()
        coordinator.published.put(address)
        second = CommandReceiver().__enter__()
        thread.join(60)
        first.__exit__(ValueError, ValueError("wrong"), None)
        assert sender._noticed.wait(60) and "wrong" in str(sender.error)
        second._leaving = True  # the process at this end is not to end
        second._connection.shutdown(socket.SHUT_RDWR)
        for reader in sender._readers:
            reader.join(60)
        assert lost == [2]


class SlowConnection:
    """Sends a message in two parts, between which other threads run."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def sendall(self, message: bytes) -> None:
        self._connection.sendall(message[:100])
        threading.Event().wait(0.01)
        self._connection.sendall(message[100:])

    def __getattr__(self, name: str):
        return getattr(self._connection, name)


def test_threads_that_send_at_once_do_not_mix_their_frames(coordinator):
    large = np.arange(1 << 10)
    with connecting() as (sender, thread), CommandReceiver() as receiver:
        thread.join(60)
        sender._connections[1] = SlowConnection(sender._connections[1])
        senders = [threading.Thread(target=sender.send, args=({"number": n}, [large + n])) for n in range(8)]
        for one in senders:
            one.start()
        commands, numbers = iter(receiver), set()
        for _ in senders:
            header, (array,) = next(commands)
            np.testing.assert_array_equal(array, large + header["number"])
            numbers.add(header["number"])
        assert numbers == set(range(8))


def test_a_process_may_reply_to_later_commands_before_another_replies_to_the_first(coordinator, monkeypatch):
    indices = iter([1, 2])
    monkeypatch.setattr(command_channel, "process_count", lambda: 3)
    monkeypatch.setattr(command_channel, "process_index", lambda: next(indices))
    with connecting() as (sender, thread):
        address = coordinator.published.get(timeout=60)
        coordinator.published.put(address)
        coordinator.published.put(address)
        with CommandReceiver() as first, CommandReceiver() as second:
            thread.join(60)
            for number in range(3):
                first.reply({"process": 1, "number": number}, [])
            for number in range(3):
                second.reply({"process": 2, "number": number}, [])
                replies = [header for header, _ in sender.collect()]
                assert replies == [{"process": process, "number": number} for process in (1, 2)]


@pytest.mark.parametrize("ends", ["close", "loss"])
def test_who_waits_for_a_reply_does_not_wait_beyond_the_end(coordinator, ends):
    raised = []

    def collect() -> None:
        with pytest.raises(OtherProcessError) as error:
            sender.collect()
        raised.append(str(error.value))

    with connecting() as (sender, thread):
        receiver = CommandReceiver().__enter__()
        thread.join(60)
        waiting = threading.Thread(target=collect)
        waiting.start()
        if ends == "close":
            sender.close()
            receiver.__exit__(None, None, None)
        else:
            receiver._leaving = True  # the process at this end is not to end
            receiver._connection.shutdown(socket.SHUT_RDWR)
        waiting.join(60)
    assert raised == ["the channel to the other processes was closed" if ends == "close" else "process 1 ended: lost"]


def test_replies_of_a_lane_wait_for_no_other_lane_and_commands_go_to_its_processes_only(coordinator, monkeypatch):
    indices = iter([1, 2])
    monkeypatch.setattr(command_channel, "process_count", lambda: 3)
    monkeypatch.setattr(command_channel, "process_index", lambda: next(indices))
    with connecting(lanes=2) as (sender, thread):
        address = coordinator.published.get(timeout=60)
        coordinator.published.put(address)
        coordinator.published.put(address)
        with CommandReceiver() as first, CommandReceiver() as second:
            thread.join(60)
            lanes = CommandLane(sender, 0, {1, 2}), CommandLane(sender, 1, {2})
            for lane in (*lanes, lanes[0]):
                lane.send({"of": lane.number})
            sender.send({"last": True})
            read = lambda receiver, n: [header for header, _ in itertools.islice(receiver, n)]  # noqa: E731
            ours, others = {"of": 0, "lane": 0}, {"of": 1, "lane": 1}
            assert read(first, 3) == [ours, ours, {"last": True}]
            assert read(second, 4) == [ours, others, ours, {"last": True}]
            second.reply({"by": 2}, [], lane=1)
            assert lanes[1].collect() == [({"by": 2}, [])]
            for receiver in (first, second):
                receiver.reply({"late": True}, [], lane=0)
            assert lanes[0].collect() == [({"late": True}, [])] * 2


def test_a_frame_that_cannot_be_sent_is_a_lost_process(coordinator, monkeypatch):
    monkeypatch.setattr(command_channel, "NOTICE_S", 0.01)
    errors = []
    with connecting(errors) as (sender, thread), CommandReceiver():
        thread.join(60)
        sender._connections[1].shutdown(socket.SHUT_WR)  # no reader notices this
        for _ in range(2):
            with pytest.raises(OtherProcessError, match="process 1 ended: lost"):
                sender.send({"number": 0}, ARRAYS)
        with pytest.raises(OtherProcessError, match="process 1 ended: lost"):
            sender.collect()
    assert errors == ["process 1 ended: lost"]


def test_an_error_of_another_thread_ends_the_wait_for_commands(coordinator):
    with connecting() as (sender, thread), CommandReceiver() as receiver:
        thread.join(60)
        sender.send({"number": 0})
        commands = iter(receiver)
        assert next(commands) == ({"number": 0}, [])
        receiver.interrupt(ValueError("no memory"))
        with pytest.raises(ValueError, match="no memory"):
            next(commands)


def test_a_failure_of_process_0_is_raised_in_the_others(coordinator):
    with connecting() as (sender, thread), pytest.raises(OtherProcessError, match="process 0 ended: no memory"):
        with CommandReceiver() as receiver:
            thread.join(60)
            sender.close("process 0 ended: no memory")
            next(iter(receiver))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("no memory"), "process 1 ended: ValueError: no memory"),
        (KeyboardInterrupt(), "process 1 ended: it was interrupted"),
        (OtherProcessError("process 2 ended: it was killed"), "process 2 ended: it was killed"),
    ],
)
def test_a_failure_of_another_process_is_raised_in_process_0(coordinator, error, sentence):
    errors = []
    with connecting(errors) as (sender, thread):
        with pytest.raises(type(error)), CommandReceiver():
            thread.join(60)
            raise error
        with pytest.raises(OtherProcessError, match=sentence):
            sender.collect()
        with pytest.raises(OtherProcessError, match=sentence):
            sender.send({})
        assert str(sender.cause_of(RuntimeError("a collective failed"))) == sentence
    assert errors == [sentence]


def test_a_connection_that_breaks_is_a_lost_process(coordinator):
    errors = []
    with connecting(errors) as (sender, thread):
        receiver = CommandReceiver().__enter__()
        thread.join(60)
        receiver._leaving = True  # the process at this end is not to end
        receiver._connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(OtherProcessError, match="process 1 ended: lost"):
            sender.collect()
    assert errors == ["process 1 ended: lost"]


def test_a_stranger_at_the_port_is_sent_away(coordinator, monkeypatch):
    monkeypatch.setattr(command_channel, "HELLO_S", 0.2)
    with connecting() as (sender, thread):
        address = coordinator.published.get(timeout=60)
        coordinator.published.put(address)
        port = command_channel.json.loads(address)["port"]
        for hello in (b"", b"x" * 64):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(hello)
                stranger.settimeout(60)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        assert thread.is_alive()
        with CommandReceiver() as receiver:
            thread.join(60)
            sender.send({"number": 0})
            assert next(iter(receiver)) == ({"number": 0}, [])


def test_closing_ends_the_wait_for_other_processes(coordinator):
    with connecting() as (sender, thread):
        sender.close()
        thread.join(60)
        assert not thread.is_alive()
