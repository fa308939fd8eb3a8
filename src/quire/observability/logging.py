"""One logger tree ("quire"), one format, one place that sets it up.

Only programs call `configure_logging` (the command line, the server, the engine's process). A library that is imported
leaves logging to its host: it never touches the root logger.
"""

from __future__ import annotations

import logging
import os
import sys

from quire.errors import OptionError, suggestion
from quire.observability.background_log import BackgroundHandler

LEVEL_VARIABLE = "QUIRE_LOG_LEVEL"
_LEVELS = ("debug", "info", "warning", "error")
LINE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
TIME_FORMAT = "%H:%M:%S"
# Loggers of the libraries under the server: they speak only when something is wrong.
_LIBRARIES = ("uvicorn", "asyncio")


def configure_logging(level: str | None = None, *, in_background: bool = False, process: str = "") -> None:
    """Sends the log to standard error. Level: the argument, else QUIRE_LOG_LEVEL, else INFO. May be called again.

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
    for old in logging.getLogger("quire").handlers:
        if isinstance(old, BackgroundHandler):
            old.retire()
    handler = BackgroundHandler(sys.stderr) if in_background else logging.StreamHandler(sys.stderr)
    line = LINE_FORMAT.replace("%(name)s", f"%(name)s [{process}]") if process else LINE_FORMAT
    handler.setFormatter(logging.Formatter(line, TIME_FORMAT))
    _attach(logging.getLogger("quire"), handler, number)
    for library in _LIBRARIES:
        _attach(logging.getLogger(library), handler, logging.WARNING)


def flush_log() -> None:
    """What was logged is written, unless nobody reads it."""
    for handler in logging.getLogger("quire").handlers:
        handler.flush()


def _attach(logger: logging.Logger, handler: logging.Handler, level: int) -> None:
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
