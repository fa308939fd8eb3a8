"""What lies in a file moves into huge pages, and whoever reads meanwhile sees the same bytes."""

import ctypes
import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from quire.config.process_memory import MemoryReport, process_memory
from quire.worker import huge_pages
from quire.worker.huge_pages import HugePages
from quire.worker.lazy_memory import lazy_zeros

SIZE = (40 << 20) + 12_345


def has_huge_pages():
    """Asked of the system itself, so that a mover that moves nothing fails where it could."""
    if not huge_pages._SETTING.is_file() or "[never]" in huge_pages._SETTING.read_text(encoding="ascii"):
        return False
    memory = lazy_zeros((4 << 20,), np.uint8, use_huge_pages=True)
    memory[:] = 1
    address = -(-memory.ctypes.data // (2 << 20)) * (2 << 20)
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(2 << 20), 25) == 0


needs_huge_pages = pytest.mark.skipif(not has_huge_pages(), reason="no huge pages here, or Linux is older than 6.1")


@pytest.fixture
def mapped(tmp_path):
    """A file with a head that ends anywhere, mapped as packed weights are."""
    return written(tmp_path / "weights", 1 << 16)


def written(path, num_bytes_at_once):
    """The system keeps what is written in small pieces in small pages, and what is written in large ones in huge pages
    where it can."""
    data = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    with path.open("wb", buffering=0) as file:
        for begin in range(0, SIZE, num_bytes_at_once):
            file.write(data[begin : begin + num_bytes_at_once])
    return np.memmap(path, dtype=np.uint8, mode="c")


@pytest.fixture
def enough(monkeypatch):
    monkeypatch.setattr(huge_pages, "_LEFT_FREE", 0)


def moved(mapped):
    moving = HugePages(mapped, seconds_before=0.0)
    moving.start()
    moving.wait()
    return moving


def num_bytes_in_file(mapped):
    """Of its addresses, those that the system still calls a file's."""
    begin, end, count = mapped.ctypes.data, mapped.ctypes.data + mapped.nbytes, 0
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            fields = line.split()
            low, high = (int(number, 16) for number in fields[0].split("-"))
            if fields[-1].endswith("/weights"):
                count += max(0, min(high, end) - max(low, begin))
    return count


@needs_huge_pages
def test_readers_see_the_same_bytes_at_every_moment(mapped, enough):
    expected = np.array(mapped)
    faults, is_over = [], threading.Event()

    def read():
        while not is_over.is_set():
            if not np.array_equal(mapped, expected):
                faults.append("other bytes")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        moving = moved(mapped)
    finally:
        is_over.set()
        reader.join()
    assert not faults
    assert np.array_equal(mapped, expected)
    # all but the ends, where a huge page would reach beyond the file
    assert moving.num_moved_bytes >= SIZE - 2 * (2 << 20)
    assert num_bytes_in_file(mapped) <= SIZE - moving.num_moved_bytes + 4096


def test_what_lies_in_huge_pages_stays_there(tmp_path, enough, monkeypatch):
    mapped = written(tmp_path / "weights", 8 << 20)
    mapped[::4096].sum()
    if huge_pages._bytes_in_huge_pages(mapped.ctypes.data) < 0.9 * SIZE:
        # this system made none; what it would say of one that does
        smaps = tmp_path / "smaps"
        begin = mapped.ctypes.data
        smaps.write_text(
            f"{begin - 4096:x}-{begin:x} r--p 00000000 fe:00 1 /lib\nFilePmdMapped: 0 kB\n"
            f"{begin:x}-{begin + SIZE:x} rw-p 00000000 fe:00 2 /weights\nRss: 40000 kB\nFilePmdMapped: 40000 kB\n"
        )
        monkeypatch.setattr(huge_pages, "_MAPPINGS", smaps)
    assert moved(mapped).num_moved_bytes == 0
    assert num_bytes_in_file(mapped) >= SIZE


@needs_huge_pages
def test_nobody_need_have_read_what_lies_in_huge_pages(tmp_path, enough):
    read = written(tmp_path / "weights", 8 << 20)
    read[::4096].sum()
    if huge_pages._bytes_in_huge_pages(read.ctypes.data) < 0.9 * SIZE:
        pytest.skip("this system keeps no files in huge pages")
    assert moved(np.memmap(tmp_path / "weights", dtype=np.uint8, mode="c")).num_moved_bytes == 0


@needs_huge_pages
def test_a_file_that_is_read_from_the_disk_may_come_in_huge_pages(mapped):
    huge_pages.read_in_huge_pages(mapped)
    assert "hg" in flags_of(mapped.ctypes.data + (4 << 20)).split()


def flags_of(address):
    """What the system was told about the mapping there."""
    is_here = False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                begin, end = (int(number, 16) for number in name.split("-"))
                is_here = begin <= address < end
            elif is_here and name == "VmFlags:":
                return rest
    return ""


@needs_huge_pages
def test_what_is_written_afterwards_stays_in_this_process(mapped, enough, tmp_path):
    before = np.array(mapped)
    moving = moved(mapped)
    moving.stop()
    assert moving.num_moved_bytes
    mapped[5 << 20 : 6 << 20] = 7
    assert (mapped[5 << 20 : 6 << 20] == 7).all()
    assert np.array_equal(mapped[6 << 20 :], before[6 << 20 :])
    assert np.array_equal(np.fromfile(tmp_path / "weights", dtype=np.uint8), before)


def test_it_can_be_stopped_before_and_between(mapped, enough, monkeypatch):
    expected = np.array(mapped)
    early = HugePages(mapped, seconds_before=1e6)
    early.start()
    early.stop()
    assert early.num_moved_bytes == 0
    HugePages(mapped).stop()  # was never started
    monkeypatch.setattr(huge_pages, "_SECONDS_BETWEEN", 1e6)
    between = HugePages(mapped, seconds_before=0.0)
    between.start()
    while (
        num_bytes_in_file(mapped) == mapped.nbytes + -mapped.nbytes % 4096
        and between._thread
        and between._thread.is_alive()
    ):
        pass
    between.stop()
    assert between.num_moved_bytes in (0, 8 << 20)
    assert np.array_equal(mapped, expected)


def test_other_programs_keep_their_memory(mapped, monkeypatch):
    """And the file is not read for its own sake: where memory is smaller, that would push out what is used."""
    advice = []
    monkeypatch.setattr(huge_pages._System, "advise", lambda _, *asked: advice.append(asked))
    monkeypatch.setattr(huge_pages, "_LEFT_FREE", process_memory().total_bytes)
    moving = HugePages(mapped, seconds_before=0.0)
    moving.start()
    moving.wait()
    assert moving.num_moved_bytes == 0
    assert not advice


def test_what_others_take_meanwhile_is_seen_before_each_piece(mapped, monkeypatch):
    """Replicas move the same file at once, and a container has less than the machine."""
    free = iter([SIZE + (2 << 30), SIZE + (2 << 30), SIZE + (1 << 30)])
    monkeypatch.setattr(huge_pages, "process_memory", lambda: MemoryReport(8 << 30, next(free), "the container's"))
    moving = moved(mapped)
    assert moving.num_moved_bytes == 8 << 20
    assert next(free, None) is None


def test_a_system_that_has_none_keeps_the_file(mapped, enough, monkeypatch):
    expected = np.array(mapped)
    monkeypatch.setattr(huge_pages._System, "move_to_huge_pages", lambda *_: False)
    moving = HugePages(mapped, seconds_before=0.0)
    moving.start()
    moving.wait()
    assert moving.num_moved_bytes == 0
    assert np.array_equal(mapped, expected)


def test_memory_that_is_never_overcommitted_keeps_the_file(mapped, enough, monkeypatch, tmp_path):
    setting = tmp_path / "overcommit_memory"
    setting.write_text("2\n")
    monkeypatch.setattr(huge_pages, "_OVERCOMMIT", setting)
    assert moved(mapped).num_moved_bytes == 0


def test_where_the_settings_are_hidden_the_file_stays(mapped, enough, monkeypatch, tmp_path):
    monkeypatch.setattr(huge_pages, "_OVERCOMMIT", tmp_path / "hidden")
    assert moved(mapped).num_moved_bytes == 0


_WITHOUT_ROOM = """
import resource
import sys

import numpy as np

from quire.config.process_memory import MemoryReport
from quire.worker import huge_pages

mapped = np.memmap(sys.argv[1], dtype=np.uint8, mode="c")
expected = np.fromfile(sys.argv[1], dtype=np.uint8)
_, most = resource.getrlimit(resource.RLIMIT_AS)


def no_room_from_here_on():
    resource.setrlimit(resource.RLIMIT_AS, (1, most))
    return MemoryReport(1 << 40, 1 << 40, "the test's")


huge_pages.process_memory = no_room_from_here_on
moving = huge_pages.HugePages(mapped, seconds_before=0.0)
moving.start()
moving.wait()
resource.setrlimit(resource.RLIMIT_AS, (most, most))
print(moving.num_moved_bytes, np.array_equal(mapped, expected))
"""


@needs_huge_pages
def test_a_move_that_finds_no_room_leaves_the_bytes_where_they_are(mapped, tmp_path):
    """In a process of its own, because a reader would end in a hole."""
    command = [sys.executable, "-c", _WITHOUT_ROOM, str(tmp_path / "weights")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (answer.returncode, answer.stdout) == (0, "0 True\n"), answer.stderr


@pytest.mark.parametrize("is_started", [True, False])
def test_a_mapping_goes_with_whoever_lets_go_of_it(is_started, mapped, enough):
    """At once, because weights that sleep are to leave memory."""
    moving = HugePages(mapped, seconds_before=0.0)
    if is_started:
        moving.start()
    moving.stop()
    ended = weakref.ref(moving)
    gc.disable()
    try:
        del moving
        assert ended() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [1 << 20, 40 << 20, 3 << 30, 200 << 30])
def test_pieces_are_not_many(size, monkeypatch):
    class Array:
        nbytes = size
        ctypes = type("Place", (), {"data": 0x7F0000001000})

    pieces = list(huge_pages._pieces(Array))
    assert len(pieces) <= 257
    assert all(address % (2 << 20) == 0 and length % (2 << 20) == 0 for address, length in pieces)
    ends = [address + length for address, length in pieces]
    assert ends[:-1] == [address for address, _ in pieces[1:]]
    assert not ends or ends[-1] <= 0x7F0000001000 + size
