"""A log that nobody reads must not stop whoever writes it."""

import io
import json
import logging
import os
import re
import sys
import threading

import pytest

from quire.errors import OptionError
from quire.observability.background_log import BackgroundHandler
from quire.observability.logging import JsonFormatter, configure_logging


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
    with os.fdopen(read, "r") as reader:
        told = (re.match(r"\((\d+) lines of the log were lost", line) for line in reader)
        num_told = next(int(found[1]) for found in told if found)
    assert num_told + handler.num_lost >= 100


class Formatter(logging.Formatter):
    """Knows which threads it ran in."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    def format(self, entry: logging.LogRecord) -> str:
        self.threads.append(threading.current_thread().name)
        if entry.msg == "broken":
            raise ValueError
        return super().format(entry)


def test_the_thread_writes_out_what_has_fields():
    """The line of each request costs its event loop no JSON."""
    stream = io.StringIO()
    handler = BackgroundHandler(stream)
    handler.setFormatter(formatter := Formatter())
    for text in ("first", "broken", "last"):
        entry = record(text)
        entry.fields = {"status": 200}
        handler.emit(entry)
    # anything else may hold what changes meanwhile
    handler.emit(record("plain"))
    handler.flush()
    lines = stream.getvalue().splitlines()
    assert [lines[0], lines[2], lines[3]] == ["first", "last", "plain"]
    assert "could not be written (ValueError)" in lines[1]
    assert sorted(formatter.threads) == [threading.current_thread().name, "quire-log", "quire-log", "quire-log"]


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


def test_json_is_an_object_a_line_with_the_fields_of_its_record():
    handler = BackgroundHandler(stream := io.StringIO())
    handler.setFormatter(JsonFormatter("process 2"))
    plain, with_fields = record("two\nlines"), record("GET / 200")
    with_fields.fields = {"status": 200, "client": "127.0.0.1:9"}
    try:
        raise ValueError("broken")
    except ValueError:
        failed = logging.LogRecord("quire", logging.ERROR, "", 0, "%s failed", ("it",), sys.exc_info())
    for one in (plain, with_fields, failed):
        handler.emit(one)
    handler.flush()
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert (first["message"], first["level"], first["process"]) == ("two\nlines", "info", "process 2")
    assert (second["status"], second["client"]) == (200, "127.0.0.1:9")
    assert third["message"] == "it failed"
    assert third["exception"].endswith("ValueError: broken")


def test_an_unknown_format_is_refused(monkeypatch):
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "xml")
    with pytest.raises(OptionError, match="text, json"):
        configure_logging()
