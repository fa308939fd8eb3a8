"""The log of a run on disk: all that came into an engine core and all that it was told, in order.

    magic, frame, frame, ...     a frame: length and checksum (both u32), then so many bytes: packed records
    packed records               zlib of: length (u32), record (MessagePack, run_records.py), length, record, ...

A frame holds what came within some milliseconds, a tenth of a second of steps without a message at most, so a process
that is killed loses no more than that. Whoever records
never waits: records go into a queue that a thread empties. When the disk is too slow, full, or the log as long as it
may be, recording ends with a warning and a mark, and the engine goes on.
"""

from __future__ import annotations

import glob
import logging
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from quire.errors import OptionError
from quire.observability.run_records import (
    Closed,
    Decided,
    Header,
    Received,
    RunRecord,
    Settled,
    decode_record,
    encode_record,
)

logger = logging.getLogger(__name__)

MAGIC = b"quire run log 1\n"
_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
# how long records are gathered before they are written
_GATHERING_SECONDS = 0.1
_LEAST_SECONDS = 0.002
# so often before the thread waits to be woken
_MOST_NAPS = 10
# of records that wait for the disk
_MOST_WAITING_BYTES = 64 * 2**20
_LEAST_WEIGHT = 512
_MOST_FRAME_BYTES = 64 * 2**20
_MOST_UNPACKED_BYTES = 2**30
_CLOSING_SECONDS = 5.0
# logs of engines that were started under one name, the newest included
MOST_LIVES = 4
# little work, and a tenth of the bytes: columns of small numbers are mostly zeros
_EFFORT = 1


class RecordSink(Protocol):
    """Where records go."""

    def write(self, record: RunRecord) -> None:
        """Returns at once."""


class RunLogWriter:
    """One file, from the start of an engine to its end. Called by one thread, and keeps records as they are until the
    other one packs them: nobody changes what stands in them."""

    def __init__(self, path: Path, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises an OptionError where nothing can be written."""
        self.path = path
        self._most_bytes = most_bytes
        self._clock = clock
        self._began = clock()
        try:
            self._file = open(path, "xb", buffering=0, opener=_private)  # noqa: SIM115 (closed by the thread)
            self._file.write(MAGIC)
        except OSError as error:
            raise OptionError(f"record={path}: cannot be written ({error.strerror}). Choose another file.") from None
        self._length = len(MAGIC)
        self._waiting: deque[RunRecord] = deque()
        # counted by one thread each
        self._num_given = self._num_written = 0
        self._has_news = threading.Event()
        self._is_asleep = False
        self._is_closing = False
        self._is_over = False
        # why, where it is not the thread that ends it
        self._reason = ""
        self._thread = threading.Thread(target=self._serve, name="quire-run-log", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Seconds since the log began."""
        return self._clock() - self._began

    @property
    def is_recording(self) -> bool:
        return not self._is_over

    @property
    def thread_id(self) -> int:
        """Of the thread that writes."""
        assert self._thread.ident is not None
        return self._thread.ident

    @property
    def num_waiting_bytes(self) -> int:
        """Given, and not on the disk yet."""
        return self._num_given - self._num_written

    def write(self, record: RunRecord) -> None:
        if self._is_over:
            return
        self._waiting.append(record)
        kind = type(record)
        if kind is Settled:
            # it ends every step, and has nothing to weigh
            if self._is_asleep:
                self._has_news.set()
            return
        self._num_given += _weight(record)
        if self._num_given - self._num_written > _MOST_WAITING_BYTES:
            self._end("the disk is too slow")
        if self._is_asleep or kind is Received:
            self._has_news.set()

    def _end(self, reason: str) -> None:
        """By whoever writes. The thread says so."""
        self._reason = reason
        self._is_over = True
        self._has_news.set()

    def close(self) -> None:
        """The engine ends in good order. Waits for the disk, but not for ever."""
        self._is_closing = True
        self._has_news.set()
        self._thread.join(_CLOSING_SECONDS)

    # ------------------------------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        reason = ""
        # the start of the last frame
        last = len(MAGIC)
        try:
            while not reason:
                self._rest()
                is_closing = self._is_closing
                last = self._length
                reason = self._write_waiting()
                if is_closing and not self._waiting:
                    break
        except OSError as error:
            reason = f"the file cannot be written: {error.strerror}"
        self._is_over = True
        if reason:
            logger.warning("%s: the run is not recorded any further: %s. The engine goes on.", self.path, reason)
        self._mark(reason, last)
        self._waiting.clear()
        self._file.close()

    def _rest(self) -> None:
        """Until there is something to write. Steps are gathered, because a wake-up costs more than what it is about;
        a message is written soon, because an engine may die of it."""
        for _ in range(_MOST_NAPS):
            is_called = self._has_news.wait(_GATHERING_SECONDS)
            self._has_news.clear()
            if self._is_closing:
                return
            if is_called:
                time.sleep(_LEAST_SECONDS)
            if self._waiting or self._reason:
                return
        self._is_asleep = True
        if not self._waiting and not self._is_closing:
            self._has_news.wait()
        self._is_asleep = False

    def _write_waiting(self) -> str:
        """Why nothing more may be written, or nothing."""
        frame_bytes = bytearray()
        weight = 0
        reason = ""
        waiting = self._waiting
        while waiting and len(frame_bytes) < _MOST_FRAME_BYTES:
            record = waiting.popleft()
            if type(record) is not Settled:
                weight += _weight(record)
            try:
                data = encode_record(record)
            except Exception as error:  # whatever an extension has put into a message, its engine goes on
                reason = f"a record cannot be written: {error}"
                break
            frame_bytes += _LENGTH.pack(len(data))
            frame_bytes += data
        if not frame_bytes:
            return reason or self._reason
        frame = _framed(frame_bytes)
        _write_whole(self._file, frame)
        self._length += len(frame)
        self._num_written += weight
        if reason or self._reason:
            return reason or self._reason
        if self._length >= self._most_bytes:
            return f"record_bytes={self._most_bytes:,} are full"
        return ""

    def _mark(self, reason: str, last: int) -> None:
        """Says how it ended. A full disk has no room for it but where the last frame began."""
        data = encode_record(Closed(at=self.now(), reason=reason))
        mark = _framed(_LENGTH.pack(len(data)) + data)
        try:
            if reason.startswith("the file"):
                self._file.truncate(last)
                self._file.seek(last)
            _write_whole(self._file, mark)
        except OSError:
            # whoever reads it finds that it was cut off
            return


def _weight(record: RunRecord) -> int:
    """About how many bytes wait with it."""
    # one comparison for what most records are: this runs in the step
    if type(record) is Decided:
        return _LEAST_WEIGHT + 2 * record.rows.nbytes + record.block_writes.nbytes
    if type(record) is Received:
        return _LEAST_WEIGHT + 8 * len(getattr(record.message, "prompt_token_ids", ()))
    return _LEAST_WEIGHT


def _framed(records: bytes | bytearray) -> bytes:
    packed = zlib.compress(records, _EFFORT)
    return _FRAME.pack(len(packed), zlib.crc32(packed)) + packed


def _write_whole(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _private(path: str, flags: int) -> int:
    """Opens it for its owner alone: what users wrote stands in it."""
    return os.open(path, flags, 0o600)


def log_path(asked: str, replica: int, num_replicas: int) -> Path:
    """Of an engine that may be one of several."""
    path = Path(asked)
    return path if num_replicas == 1 else path.with_stem(f"{path.stem}-replica{replica}")


def free_name(asked: Path) -> Path:
    """`run.qlog`, then `run.2.qlog`, `run.3.qlog`: an engine that is started again does not overwrite what its
    predecessor died of. Of these the oldest go, so that MOST_LIVES are left with the new one. A file of such a name
    that is no log is somebody else's, and stays."""
    there = _lives(asked)
    logs = [number for number in sorted(there) if _is_log(there[number])]
    for oldest in logs[: max(0, len(logs) - MOST_LIVES + 1)]:
        there[oldest].unlink(missing_ok=True)
    last = max(there, default=0)
    return asked if not last else asked.with_name(f"{asked.stem}.{last + 1}{asked.suffix}")


def newest(asked: Path) -> Path | None:
    """Of the engine that was started last under this name."""
    there = _lives(asked)
    return there[max(there)] if there else None


def _lives(asked: Path) -> dict[int, Path]:
    """The logs that are there, by number."""
    there = {1: asked} if asked.exists() else {}
    for file in asked.parent.glob(f"{glob.escape(asked.stem)}.*{glob.escape(asked.suffix)}"):
        number = file.name.removeprefix(f"{asked.stem}.").removesuffix(asked.suffix)
        if number.isdecimal():
            there[int(number)] = file
    return there


def _is_log(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------- reading


class RunLog:
    """A log that was written, read from its start. `ending` says how it ended, once everything was read."""

    def __init__(self, path: Path) -> None:
        """Raises an OptionError for what is no log that this version reads."""
        self.path = path
        self.ending = ""
        self._records = self._read()
        first = next(self._records, None)
        if not isinstance(first, Header):
            raise OptionError(f"{path}: nothing was recorded in it ({self.ending or 'it has no header'}).")
        self.header = first

    def __iter__(self) -> Iterator[RunRecord]:
        """What follows the header; once."""
        return self._records

    def _read(self) -> Iterator[RunRecord]:
        try:
            with self.path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise OptionError(f"{self.path}: is no log of a run. Make one: quire serve --record run.qlog.")
                yield from self._read_frames(file)
        except OSError as error:
            raise OptionError(f"{self.path}: cannot be read ({error.strerror}).") from None

    def _read_frames(self, file: BinaryIO) -> Iterator[RunRecord]:
        self.ending = "it was cut off"
        while True:
            at = file.tell()
            head = file.read(_FRAME.size)
            if not head:
                return
            packed = b""
            if len(head) == _FRAME.size:
                length, checksum = _FRAME.unpack(head)
                packed = file.read(length) if length <= 2 * _MOST_FRAME_BYTES else b""
            if not packed or len(packed) != length or zlib.crc32(packed) != checksum:
                self.ending = f"it was cut off or damaged at byte {at:,}"
                return
            try:
                for record in _unpacked(packed):
                    if isinstance(record, Closed):
                        self.ending = record.reason or "the engine was ended"
                    yield record
            except (msgspec.DecodeError, zlib.error, struct.error, RecursionError) as error:
                raise OptionError(
                    f"{self.path}: has a record that Quire of this version does not know ({error}). "
                    "Read it with the version that wrote it."
                ) from None


def _unpacked(packed: bytes) -> Iterator[RunRecord]:
    data = zlib.decompressobj().decompress(packed, _MOST_UNPACKED_BYTES)
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        yield decode_record(data[at : at + length])
        at += length
