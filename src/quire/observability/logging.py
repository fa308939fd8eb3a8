"""One logger tree ("quire"), one place that sets it up; lines for people, or JSON for programs.

Only programs call `configure_logging` (the command line, the server, the engine's process). A library that is imported
leaves logging to its host: it never touches the root logger.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

from quire.errors import OptionError, suggestion
from quire.observability.background_log import BackgroundHandler

LEVEL_VARIABLE = "QUIRE_LOG_LEVEL"
FORMAT_VARIABLE = "QUIRE_LOG_FORMAT"
FORMATS = ("text", "json")
_LEVELS = ("debug", "info", "warning", "error")
_LINE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_TIME_FORMAT = "%H:%M:%S"
# Loggers of the libraries under the server: they speak only when something is wrong.
_LIBRARIES = ("uvicorn", "asyncio")


def configure_logging(level: str | None = None, *, in_background: bool = False, process: str = "") -> None:
    """Sends the log to standard error. Level: the argument, else QUIRE_LOG_LEVEL, else INFO. May be called again. The
    format is QUIRE_LOG_FORMAT's.

    `in_background`: whoever logs never waits for the log's reader; `flush_log` does, for a second at most.
    `process`: stands in each line, where several processes write to one log.
    """
    name = (level or os.environ.get(LEVEL_VARIABLE) or "INFO").upper()
    number = logging.getLevelNamesMapping().get(name)
    if number is None:
        known = ", ".join(_LEVELS)
        raise OptionError(
            f"{LEVEL_VARIABLE}={name.lower()}: must be one of {known}.{suggestion(name.lower(), _LEVELS)}"
        )
    lines = line_formatter(process)
    for old in logging.getLogger("quire").handlers:
        if isinstance(old, BackgroundHandler):
            old.retire()
    handler = BackgroundHandler(sys.stderr) if in_background else logging.StreamHandler(sys.stderr)
    handler.setFormatter(lines)
    _attach(logging.getLogger("quire"), handler, number)
    for library in _LIBRARIES:
        _attach(logging.getLogger(library), handler, logging.WARNING)


def line_formatter(process: str = "") -> logging.Formatter:
    """As QUIRE_LOG_FORMAT says."""
    form = os.environ.get(FORMAT_VARIABLE) or FORMATS[0]
    if form not in FORMATS:
        raise OptionError(f"{FORMAT_VARIABLE}={form}: must be one of {', '.join(FORMATS)}.")
    if form == "json":
        return JsonFormatter(process)
    line = _LINE_FORMAT.replace("%(name)s", f"%(name)s [{process}]") if process else _LINE_FORMAT
    return logging.Formatter(line, _TIME_FORMAT)


class JsonFormatter(logging.Formatter):
    """One object a line. What a record says in fields (`extra={"fields": ...}`) stands in it as such."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def flush_log() -> None:
    """What was logged is written, unless nobody reads it."""
    for handler in logging.getLogger("quire").handlers:
        handler.flush()


def _attach(logger: logging.Logger, handler: logging.Handler, level: int) -> None:
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
