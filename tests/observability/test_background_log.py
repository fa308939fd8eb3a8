"""A log that nobody reads must not stop whoever writes it."""

import io
import logging
import os

from quire.observability.background_log import BackgroundHandler


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
