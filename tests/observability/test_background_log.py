"""A log that nobody reads must not stop whoever writes it."""

import io
import logging
import os
import sys
import threading

import pytest

from quire.observability.background_log import BackgroundHandler
from quire.observability.logging import configure_logging


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("quire", logging.INFO, "", 0, text, None, None)


def test_lines_come_in_their_order():
    stream = io.StringIO()
    handler = BackgroundHandler(stream)
    for number in range(100):
        handler.emit(record(f"line {number}"))
    handler.flush()
    assert stream.getvalue().splitlines() == [f"line {number}" for number in range(100)]


def test_a_full_pipe_blocks_nobody_and_the_loss_is_told():
    read, write = os.pipe()
    handler = BackgroundHandler(os.fdopen(write, "w"), most_lines=10)
    for _ in range(200):  # far more than a pipe holds
        handler.emit(record("x" * 1000))
    assert handler.num_lost >= 100
    with os.fdopen(read, "r") as reader:
        assert any("lines of the log were lost" in line for line in reader)


def test_a_stream_that_was_closed_ends_nothing():
    stream = io.StringIO()
    handler = BackgroundHandler(stream)
    stream.close()
    handler.emit(record("x"))
    handler.flush()


@pytest.fixture
def loggers():
    """As they were, afterwards."""
    names = ("quire", "uvicorn", "asyncio")
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in map(logging.getLogger, names)]
    yield
    for name, (handlers, level, propagate) in zip(names, before, strict=True):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def writers() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "quire-log"}


def test_a_second_call_leaves_no_thread_behind_and_all_lines_in_their_order(loggers, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    others, seen = writers(), set()
    for number in range(5):
        configure_logging("info", in_background=number < 4)
        seen |= writers() - others
        for line in range(20):
            logging.getLogger("quire").info("line %d", number * 20 + line)
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == [str(number) for number in range(100)]
    for thread in seen:
        thread.join(10)
    assert seen
    assert not any(thread.is_alive() for thread in seen)
