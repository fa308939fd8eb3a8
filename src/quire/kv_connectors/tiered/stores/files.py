"""Blocks as files of a folder: `file:///folder?size=16GiB`. Several engines may share it, on one machine or over a
network.

A file is written beside its place and renamed, so nobody reads half of one. The folder is bounded: what was not read
for longest goes first. Times of reading are kept in memory, and written into the files now and then (as their time of
change), so that other engines and a later start know them, whatever the mount says of access times.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from urllib.parse import unquote, urlsplit

from quire.config.kv_store import size_of
from quire.errors import OptionError
from quire.kv_connectors.tiered.stores.store import StoreState

# a file that was read is not touched more often
_TOUCH_SECONDS = 60.0
# a bounded folder is looked through again when so much of its bound has been written since: others write as well
_LOOK_AGAIN_AFTER = 0.1
_UNFINISHED = ".part"
_DEFAULT_BYTES = 16 * 2**30
# what another engine began to write, and has not finished by then, it never will
_FORGOTTEN_SECONDS = 3600.0


def open_store(address: str) -> Files:
    parts = urlsplit(address)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise OptionError(f"kv_store={address}: a folder is named from the root on, as in file:///var/cache/quire.")
    folder = Path(unquote(parts.path))
    max_bytes = size_of(address) or _DEFAULT_BYTES
    try:
        # what lies there says what prompts said
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / f"probe-{os.getpid()}-{threading.get_ident()}{_UNFINISHED}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OptionError(f"kv_store={address}: {error}. Give a folder that this program may write into.") from error
    return Files(folder, max_bytes)


class Files:
    """The bound holds for what all engines together have written, as far as this one has seen it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # by name, the least recently read one first
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._touched: dict[str, float] = {}
        self._num_bytes = 0
        self._num_bytes_since = 0
        self._numbers = itertools.count()
        with self._lock:
            self._look_through()

    def exists_many(self, names: list[str]) -> list[bool]:
        return [self._path(name).exists() for name in names]

    def get_many(self, names: list[str]) -> list[bytes | None]:
        return [self._get(name) for name in names]

    def put_many(self, values: list[tuple[str, bytes]]) -> None:
        for name, value in values:
            self._put(name, value)

    def delete(self, names: list[str]) -> None:
        with self._lock:
            for name in names:
                self._drop(name)

    def stat(self) -> StoreState:
        with self._lock:
            return StoreState(len(self._sizes), self._num_bytes)

    def close(self) -> None:
        """Nothing is open."""

    def _path(self, name: str) -> Path:
        return self._folder / name

    def _get(self, name: str) -> bytes | None:
        path = self._path(name)
        try:
            value = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
            # one that somebody else has put there, or closed to this program, says nothing of the others
            return None
        now = time.time()
        with self._lock:
            self._note(name, len(value))
            is_due = now - self._touched.get(name, 0.0) > _TOUCH_SECONDS
            if is_due:
                self._touched[name] = now
        if is_due:
            # another engine may have removed it, or owns it: it was read all the same
            with contextlib.suppress(OSError):
                os.utime(path)
        return value

    def _put(self, name: str, value: bytes) -> None:
        if len(value) > self._max_bytes:
            return
        path = self._path(name)
        unfinished = path.with_name(f"{path.name}-{os.getpid()}-{next(self._numbers)}{_UNFINISHED}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._make_room(name, len(value))
        try:
            unfinished.write_bytes(value)
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            with self._lock:
                self._drop(name)
            raise

    def _make_room(self, name: str, num_bytes: int) -> None:
        self._num_bytes_since += num_bytes
        if self._num_bytes_since > _LOOK_AGAIN_AFTER * self._max_bytes:
            self._look_through()
        self._note(name, num_bytes)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._sizes)))

    def _note(self, name: str, num_bytes: int) -> None:
        """It was used last of all, and has so many bytes."""
        self._num_bytes += num_bytes - self._sizes.pop(name, 0)
        self._sizes[name] = num_bytes

    def _drop(self, name: str) -> None:
        self._num_bytes -= self._sizes.pop(name, 0)
        self._touched.pop(name, None)
        self._path(name).unlink(missing_ok=True)

    def _look_through(self) -> None:
        """At the folder, the one truth that all who use it share."""
        self._num_bytes_since = 0
        found: list[tuple[float, str, int]] = []
        for folder, _, files in os.walk(self._folder):
            for file in files:
                path = os.path.join(folder, file)
                try:
                    state = os.stat(path)
                    if file.endswith(_UNFINISHED):
                        if time.time() - state.st_mtime > _FORGOTTEN_SECONDS:
                            os.unlink(path)
                        continue
                except FileNotFoundError:
                    continue
                read_at = max(state.st_mtime, self._touched.get(os.path.relpath(path, self._folder), 0.0))
                found.append((read_at, os.path.relpath(path, self._folder), state.st_size))
        order = {name: place for place, name in enumerate(self._sizes)}
        # of equal age, and of those that were read since they were touched, in the order that is known here
        found.sort(key=lambda one: (one[0], order.get(one[1], -1)))
        self._sizes = OrderedDict((name, size) for _, name, size in found)
        self._num_bytes = sum(self._sizes.values())
        self._touched = {name: when for name, when in self._touched.items() if name in self._sizes}
