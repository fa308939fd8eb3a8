"""A log handler that never waits for its reader.

Whoever reads a program's log may stop reading: the pipe fills up, and the next line written to it blocks. A thread
writes here, so it alone is blocked; what does not fit into its queue is counted, and the count is written when there is
room again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from typing import TextIO

_MOST_LINES = 10_000
_FLUSH_SECONDS = 1.0


class BackgroundHandler(logging.Handler):
    """Lines to a stream, in their order, or not at all."""

    def __init__(self, stream: TextIO, most_lines: int = _MOST_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._descriptor = _descriptor_of(stream)
        # None: no more will come
        self._lines: queue.Queue[str | logging.LogRecord | None] = queue.Queue(most_lines)
        self.num_lost = 0
        threading.Thread(target=self._write, name="quire-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # what comes with fields is made of values, as each request's line: the thread writes it out
            has_fields = hasattr(record, "fields") and not record.exc_info
            self._lines.put_nowait(record if has_fields else self.format(record))
        except queue.Full:
            self.num_lost += 1
        except Exception:  # as every handler: a line that cannot be formatted ends nothing
            self.handleError(record)

    def flush(self) -> None:
        """Until everything is written; at most a second, if nobody reads."""
        done = self._lines.all_tasks_done
        with done:
            done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_SECONDS)

    def retire(self) -> None:
        """Another handler takes its place: what came so far is written, then its thread ends."""
        self.flush()
        # full: nobody reads, and the thread waits for that in any case
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)

    def _write(self) -> None:
        while (entry := self._lines.get()) is not None:
            line = self._line_of(entry)
            lost = self.num_lost
            self.num_lost = 0
            if lost:
                line = f"{line}\n({lost} lines of the log were lost, because nobody read it)"
            # a closed stream: nobody is left to be told
            with contextlib.suppress(OSError, ValueError):
                self._put(line + "\n")
            self._lines.task_done()
        self._lines.task_done()

    def _line_of(self, entry: str | logging.LogRecord) -> str:
        if isinstance(entry, str):
            return entry
        try:
            return self.format(entry)
        except Exception as error:  # as above
            return f"{entry.name}: a line that could not be written ({type(error).__name__})"

    def _put(self, text: str) -> None:
        if self._descriptor is None:
            self._stream.write(text)
            self._stream.flush()
            return
        # Past the stream's own buffer: a thread that is blocked in there holds its lock, and the interpreter
        # cannot end.
        rest = memoryview(text.encode(errors="backslashreplace"))
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None
