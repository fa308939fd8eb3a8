"""One clock looks whether clients take what is written to them."""

import pytest

from quire.interfaces.server.transport.slow_readers import SlowReaders, close_soon


class Transport:
    def __init__(self):
        self.unsent, self.is_closed, self.is_cut_off = 0, False, False

    def get_write_buffer_size(self):
        return self.unsent

    def close(self):
        self.is_closed = True

    def abort(self):
        self.is_cut_off = True


class Loop:
    def __init__(self):
        self.due = []

    def call_later(self, delay, callback, *args):
        self.due.append((delay, callback, args))

    def go_on(self):
        _, callback, args = self.due.pop(0)
        callback(*args)


class Reader:
    def __init__(self, loop, takes=False):
        self.loop, self.transport, self.client, self.takes = loop, Transport(), ("10.0.0.1", 5), takes

    def has_taken(self):
        return self.takes


def looks_until(loop, is_true):
    for number in range(1, 20):
        loop.go_on()
        if is_true():
            return number
    return None


@pytest.mark.parametrize("is_closing", [False, True])
def test_who_takes_nothing_of_a_few_bytes_is_cut_off(is_closing):
    """Also where the connection closes already, and waits for nothing else."""
    loop, room = Loop(), SlowReaders(60)
    reader = Reader(loop)
    room.arrive(reader)
    reader.transport.unsent = 1
    if is_closing:
        reader.transport.close()
    assert looks_until(loop, lambda: reader.transport.is_cut_off) == 5


def test_who_takes_something_is_not():
    loop, room = Loop(), SlowReaders(60)
    taking, finished, slow = Reader(loop, takes=True), Reader(loop), Reader(loop)
    for reader in (taking, finished, slow):
        room.arrive(reader)
    taking.transport.unsent, slow.transport.unsent = 4096, 100
    for _ in range(50):
        loop.go_on()
        slow.transport.unsent -= 1
    assert not any(reader.transport.is_cut_off for reader in (taking, finished, slow))


def test_one_clock_runs_while_there_is_somebody():
    loop, room = Loop(), SlowReaders(60)
    readers = [Reader(loop) for _ in range(3)]
    for reader in readers:
        room.arrive(reader)
    assert [delay for delay, *_ in loop.due] == [15]
    for reader in readers:
        room.leave(reader)
    loop.go_on()
    assert not loop.due
    room.arrive(readers[0])
    assert len(loop.due) == 1


@pytest.mark.parametrize("unsent", [0, 1])
def test_who_has_to_go_has_a_moment_for_what_was_written(unsent):
    loop, transport = Loop(), Transport()
    transport.unsent = unsent
    close_soon(loop, transport)
    assert transport.is_closed
    assert len(loop.due) == unsent
    if unsent:
        loop.go_on()
        assert transport.is_cut_off
