"""SampleJournal: the messages of the episodes that play, on disk, so that what was sampled survives the process.

    FOLDER/GROUP/SEED   the samples of one session in their order, from its opening until its group is stored or dropped

An episode that was cut short plays again with the same seed: its session returns the recorded samples while the
contexts are those of before, and tools run again. From the first context that differs on, as after a test that printed
a time, the policy samples.
"""

import asyncio
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.frames import FrameError, encode_frame, frame_buffers, read_frame
from composer_jax.rl.workers.messages import sample_from_frame, sample_to_frame
from composer_jax.sampler.policy import Policy, Sample, Session


class SampleJournal:
    """The journals of all groups of a run."""

    def __init__(self, folder: Path, before_write: Callable[[], None] | None = None):
        """before_write: called before every write, such as Workdir.require_held."""
        self._folder, self._before_write, self._writes = folder, before_write, GatheredWrites()

    def recorded(self, policy: Policy, group: int) -> "RecordedPolicy":
        """Returns `policy` for the episodes of a group: its sessions record their samples, and return those on disk."""
        return RecordedPolicy(policy, self._folder / f"{group:08d}", self._before_write, self._writes)

    def forget(self, group: int) -> None:
        """Deletes what the episodes of a group have sampled."""
        shutil.rmtree(self._folder / f"{group:08d}", ignore_errors=True)

    def keep(self, groups: Collection[int]) -> None:
        """Deletes what the episodes of all other groups have sampled."""
        if self._folder.exists():
            for folder in self._folder.iterdir():
                if int(folder.name) not in groups:
                    self.forget(int(folder.name))


class GatheredWrites:
    """Calls in a thread, of which all that wait go together: handing one to a thread takes longer than writing it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], object], asyncio.Future[None]]] = []
        self._running: asyncio.Task[None] | None = None

    async def run(self, write: Callable[[], object]) -> None:
        """Returns when `write` has run, or raises what it raised. It runs though the caller is cancelled."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((write, done))
        if self._running is None:
            self._running = asyncio.create_task(self._run_all())
        await done

    async def _run_all(self) -> None:
        while self._waiting:
            together, self._waiting = self._waiting, []
            for error, (_, done) in zip(await asyncio.to_thread(_run_each, together), together, strict=True):
                if done.done():  # cancelled
                    continue
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
        self._running = None


def _run_each(calls: Sequence[tuple[Callable[[], object], Any]]) -> list[Exception | None]:
    errors: list[Exception | None] = []
    for call, _ in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
        else:
            errors.append(None)
    return errors


class RecordedPolicy:
    """A Policy whose sessions are recorded in a folder, one file per seed."""

    def __init__(self, policy: Policy, folder: Path, before_write: Callable[[], None] | None, writes: GatheredWrites):
        self._policy, self._folder, self._before_write, self._writes = policy, folder, before_write, writes

    async def open(self, seed: int) -> "RecordedSession":
        session = await self._policy.open(seed)
        try:
            file = _File(self._folder / f"{seed:08x}", self._before_write)
            return RecordedSession(session, file, await file.read(), self._writes)
        except BaseException:
            session.close()
            raise


@dataclasses.dataclass(frozen=True)
class _Record:
    """One recorded sample.

    request: hash of what was asked. start: its place in the file, in bytes.
    """

    request: str
    sample: Sample
    start: int


class RecordedSession:
    """A Session that returns its recorded samples first. Their routes begin where they were asked for."""

    def __init__(self, session: Session, file: "_File", records: Sequence[_Record], writes: GatheredWrites):
        self.max_model_len = session.max_model_len
        self._session, self._file, self._records, self._writes = session, file, deque(records), writes

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        """See Session.sample. Returns when the sample is in the file."""
        tokens = np.asarray(context, np.int32)
        request = _hash_request(tokens, params, branch)
        if self._records:
            record = self._records.popleft()
            if record.request == request:
                return record.sample
            self._records.clear()
            await asyncio.to_thread(self._file.truncate, record.start)
        sample = await self._session.sample(context, params, branch=branch)
        if sample.finish_reason != "cancelled":
            await self._writes.run(functools.partial(self._file.append, request, sample))
        return sample

    def close(self) -> None:
        self._session.close()


class _File:
    """The samples of one session as frames. A kill leaves at most an incomplete last one."""

    def __init__(self, path: Path, before_write: Callable[[], None] | None):
        self._path, self._before_write = path, before_write

    async def read(self) -> list[_Record]:
        """Returns the complete samples up to the first damaged one, and removes what follows them."""
        if not self._path.exists():
            return []
        content = await asyncio.to_thread(self._path.read_bytes)
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        records, start = [], 0
        while start < len(content):
            try:
                header, arrays = frame = await read_frame(reader)
                if header["crc"] != _checksum(arrays):
                    break
                records.append(_Record(header["request"], sample_from_frame(header, arrays), start))
            except (FrameError, asyncio.IncompleteReadError, LookupError, TypeError, ValueError):
                break
            start += len(encode_frame(*frame))
        if start < len(content):
            await asyncio.to_thread(self.truncate, start)
        return records

    def append(self, request: str, sample: Sample) -> None:
        self._check()
        header, arrays = sample_to_frame(sample)
        try:
            opened = self._path.open("ab")
        except FileNotFoundError:  # the first of its group
            self._path.parent.mkdir(parents=True, exist_ok=True)
            opened = self._path.open("ab")
        with opened as file:
            file.writelines(frame_buffers({**header, "request": request, "crc": _checksum(arrays)}, arrays))

    def truncate(self, size: int) -> None:
        self._check()
        os.truncate(self._path, size)

    def _check(self) -> None:
        if self._before_write is not None:
            self._before_write()


def _checksum(arrays: Sequence[np.ndarray]) -> int:
    return functools.reduce(lambda crc, array: zlib.crc32(array.tobytes(), crc), arrays, 0)


def _hash_request(tokens: np.ndarray, params: SamplingParams, branch: int) -> str:
    digest = hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=16)
    digest.update(json.dumps([vars(params), branch]).encode())
    return digest.hexdigest()
