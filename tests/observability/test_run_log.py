"""The log of a run on disk: it never holds up its engine, and says how it ended."""

import stat
import struct
import threading
import zlib

import pytest

from quire.config import EngineOptions, resolve
from quire.errors import OptionError
from quire.messages import AbortRequests, ControlCall
from quire.observability.run_log import MAGIC, RunLog, RunLogWriter, free_name
from quire.observability.run_records import FORMAT, Closed, Header, Received

CONFIG, _ = resolve(EngineOptions(device="cpu", num_threads=1))
HEADER = Header(at=0.0, format=FORMAT, version="0", date="", config=CONFIG, model="m", machine={})


def received(number):
    return Received(at=float(number), message=AbortRequests(request_ids=[number]))


def numbers_in(log):
    return [record.message.request_ids[0] for record in log if isinstance(record, Received)]


@pytest.fixture
def writer(tmp_path):
    writer = RunLogWriter(tmp_path / "run.qlog", 2**20)
    writer.write(HEADER)
    yield writer
    writer.close()


def test_records_come_back_in_order(writer):
    for number in range(500):
        writer.write(received(number))
    writer.close()
    log = RunLog(writer.path)
    assert log.header == HEADER
    assert numbers_in(log) == list(range(500))
    assert log.ending == "the engine was ended"


def test_a_log_that_is_full_ends_with_a_mark(tmp_path, caplog):
    writer = RunLogWriter(tmp_path / "run.qlog", 10_000)
    writer.write(HEADER)
    number = 0
    while writer.is_recording:
        writer.write(received(number))
        number += 1
    writer.close()
    log = RunLog(writer.path)
    found = numbers_in(log)
    assert found == list(range(len(found)))
    assert log.ending == "record_bytes=10,000 are full"
    assert sum("not recorded any further" in record.message for record in caplog.records) == 1


class Disk:
    """A file that fails, or hangs until it is let go."""

    def __init__(self, file, *, is_full=False):
        self._file = file
        self._is_full = is_full
        self.may_go_on = threading.Event()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        if self._is_full and len(data) > 200:
            # a part of it still fits
            self._file.write(data[:50])
            raise OSError(28, "No space left on device")
        if not self._is_full:
            self.may_go_on.wait(60)
        return self._file.write(data)


def test_a_full_disk_ends_the_log_behind_the_last_whole_frame(writer, caplog):
    writer.write(received(0))
    while writer.num_waiting_bytes:
        pass
    writer._file = Disk(writer._file, is_full=True)
    for number in range(1, 5000):
        writer.write(received(number))
    while writer.is_recording:
        pass
    writer.write(received(5000))
    writer.close()
    log = RunLog(writer.path)
    assert numbers_in(log) == [0]
    assert log.ending == "the file cannot be written: No space left on device"
    assert "The engine goes on" in caplog.text


def test_a_slow_disk_holds_nobody_up(writer, monkeypatch):
    monkeypatch.setattr("quire.observability.run_log._MOST_WAITING_BYTES", 100_000)
    while writer.num_waiting_bytes:
        pass
    disk = writer._file = Disk(writer._file)
    number = 0
    while writer.is_recording:
        writer.write(received(number))
        number += 1
    assert number < 20_000
    disk.may_go_on.set()
    writer.close()
    log = RunLog(writer.path)
    found = numbers_in(log)
    assert found == list(range(len(found)))
    assert log.ending == "the disk is too slow"


def test_what_no_log_can_hold_ends_the_log_and_nothing_else(writer):
    writer.write(received(0))
    message = ControlCall(call_id=0, name="x", args={"content": object()})
    writer.write(Received(at=1.0, message=message))
    writer.write(received(1))
    writer.close()
    log = RunLog(writer.path)
    assert numbers_in(log) == [0]
    assert "does not cross a socket" in log.ending


def test_the_last_record_says_why(writer):
    writer.close()
    assert list(RunLog(writer.path)) == [Closed(at=pytest.approx(0.0, abs=60.0), reason="")]


@pytest.mark.parametrize("file", ["run.qlog", "run[1].qlog"])
def test_an_engine_that_starts_again_writes_another_log(tmp_path, file):
    asked = tmp_path / file
    names = []
    for _ in range(6):
        name = free_name(asked)
        name.write_bytes(MAGIC)
        names.append(name.name)
    assert names == [file, *(f"{asked.stem}.{number}.qlog" for number in range(2, 7))]
    assert sorted(there.name for there in tmp_path.iterdir()) == names[2:]


def test_files_that_are_no_logs_are_never_deleted(tmp_path):
    asked = tmp_path / "notes.txt"
    theirs = [asked, tmp_path / "notes.2.txt", tmp_path / "notes.3.txt"]
    for file in theirs:
        file.write_text("mine")
    for _ in range(6):
        free_name(asked).write_bytes(MAGIC)
    assert [file.read_text() for file in theirs] == ["mine"] * 3


def test_a_log_is_for_its_owner_alone(writer):
    assert stat.S_IMODE(writer.path.stat().st_mode) & 0o077 == 0


def test_a_record_that_is_nested_too_deep_is_one_clear_error(tmp_path):
    told = b"\x96\xa4told\xa1q" + b"\x91" * 100_000 + b"\xc0\xa0\xa0\x00"
    packed = zlib.compress(struct.pack("<I", len(told)) + told)
    path = tmp_path / "deep.qlog"
    path.write_bytes(MAGIC + struct.pack("<II", len(packed), zlib.crc32(packed)) + packed)
    with pytest.raises(OptionError, match="does not know"):
        RunLog(path)


def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path):
    with pytest.raises(OptionError, match="cannot be written"):
        RunLogWriter(tmp_path / "nowhere" / "run.qlog", 2**20)
