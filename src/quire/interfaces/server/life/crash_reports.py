"""One file for each death of an engine, for whoever looks into it the next morning.

A report says what is known without the dead: cause, stacks, last decisions, versions, configuration. It never holds a
prompt, an output or a key: what it is made of has none. Writing one must not stop a server that could go on, so a
folder that is full or closed costs a line in the log.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from quire.cache_folder import cache_folder
from quire.config import EngineConfig
from quire.version import __version__

logger = logging.getLogger("quire.server")

MOST_REPORTS = 20
_MOST_CAUSE = 2000
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "fastapi", "uvicorn", "pyzmq", "msgspec")


def folder_of(option: str) -> Path | None:
    """What the option crash_reports means: a folder, the user's cache, or none."""
    if option == "none":
        return None
    if option != "auto":
        return Path(os.path.expanduser(option))
    try:
        return cache_folder() / "crash_reports"
    except OSError as error:
        logger.warning("there will be no crash reports: %s", error)
        return None


class CrashReports:
    """Writes to a folder of its own; the oldest go when there are more than MOST_REPORTS."""

    def __init__(self, folder: Path | None, now: Callable[[], float] = time.time) -> None:
        """None writes nothing."""
        self._folder = folder
        self._now = now

    def write(self, cause: str, stacks: str, config: EngineConfig, facts: Mapping[str, Any]) -> Path | None:
        """The file, or None. Blocks as long as the disk does."""
        if self._folder is None:
            return None
        report = {
            "cause": cause[:_MOST_CAUSE],
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._now())),
            **facts,
            "versions": versions(),
            "configuration": msgspec.to_builtins(config, enc_hook=str),
            "stacks": stacks.splitlines(),
        }
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            second = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self._now()))
            file = _free(self._folder / f"engine-{second}-{os.getpid()}.json")
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as out:
                json.dump(report, out, indent=1, default=str)
            self._make_room()
        except OSError as error:
            logger.warning("no crash report was written to %s: %s", self._folder, error.strerror or error)
            return None
        return file

    def _make_room(self) -> None:
        assert self._folder is not None
        files = sorted(self._folder.glob("engine-*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[MOST_REPORTS:]:
            file.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Of the program and of what it stands on, without importing any of it."""
    found = {"quire": __version__, "python": sys.version.split()[0], "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _free(file: Path) -> Path:
    """Two deaths within a second have two reports."""
    number = 1
    candidate = file
    while candidate.exists():
        number += 1
        candidate = file.with_stem(f"{file.stem}-{number}")
    return candidate
