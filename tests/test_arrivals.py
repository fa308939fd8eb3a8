"""The bell that a long step looks at."""

import os
import select

import pytest

from quire.processes.arrivals import Arrivals

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="no kernel here computes long steps")


def rings(arrivals: Arrivals) -> bool:
    return bool(select.select([arrivals.descriptor], [], [], 0)[0])


def test_the_bell_rings_until_it_is_hushed():
    arrivals = Arrivals()
    assert not rings(arrivals)
    for _ in range(3):
        arrivals.ring()
    assert rings(arrivals)
    arrivals.hush()
    assert not rings(arrivals)
    arrivals.close()
    arrivals.ring()
    arrivals.hush()


def test_it_rings_while_a_step_is_decided_behind_a_message():
    arrivals = Arrivals()
    heard = []

    def step() -> None:
        heard.append(rings(arrivals))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        arrivals.hurry(step)
    assert heard == [True]
    assert not rings(arrivals)
    arrivals.close()


def test_files_that_are_watched_ring_too():
    arrivals = Arrivals()
    reader, writer = os.pipe()
    arrivals.watch(reader)
    os.write(writer, b"!")
    assert rings(arrivals)
    arrivals.hush()
    assert rings(arrivals), "it is for others to read"
    arrivals.forget(reader)
    assert not rings(arrivals)
    arrivals.close()
    os.close(reader)
    os.close(writer)
