"""Result lines in OpenAI's form, and the file that they are appended to: whole lines, also after a crash.

What a file holds is what was done: whoever opens it again is told which requests are in it.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from quire.interfaces.gateway.batches.endpoint_calls import Called
from quire.interfaces.gateway.files.disk import write_all

_OK = 200


class Failure(msgspec.Struct):
    """Why a request was not run at all."""

    code: str
    message: str


class ResultLine(msgspec.Struct, kw_only=True):
    """One request, done."""

    id: str
    custom_id: str
    response: Called | None
    error: Failure | None

    @property
    def is_good(self) -> bool:
        return self.response is not None and self.response.status_code == _OK


class _Tokens(msgspec.Struct):
    """`usage` in the words of the chats' endpoint, or of the responses'."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Tokens | None = None


class _OldLine(msgspec.Struct):
    custom_id: str
    response: Called | None


def answered(custom_id: str, called: Called) -> ResultLine:
    return ResultLine(id=_new_id(), custom_id=custom_id, response=called, error=None)


def not_run(custom_id: str, code: str, message: str) -> ResultLine:
    return ResultLine(id=_new_id(), custom_id=custom_id, response=None, error=Failure(code, message))


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


@dataclass(slots=True)
class Tally:
    """What result files hold, added up."""

    done: set[str] = field(default_factory=set)
    num_good: int = 0
    num_bad: int = 0
    num_input_tokens: int = 0
    num_output_tokens: int = 0

    def add(self, custom_id: str, response: Called | None) -> None:
        self.done.add(custom_id)
        if response is None or response.status_code != _OK:
            self.num_bad += 1
            return
        self.num_good += 1
        try:
            usage = msgspec.json.decode(response.body, type=_Answer).usage
        except msgspec.MsgspecError:
            return
        if usage is not None:
            self.num_input_tokens += usage.prompt_tokens + usage.input_tokens
            self.num_output_tokens += usage.completion_tokens + usage.output_tokens


class ResultFile:
    """Appends lines. Made when the first one comes; all methods block."""

    def __init__(self, path: Path, mode: int) -> None:
        self.path = path
        self._mode = mode
        self._descriptor = -1
        self._size = 0

    def recover(self, tally: Tally) -> None:
        """Adds what the file holds already. A line that a crash has cut is cut off."""
        if not self.path.exists():
            return
        size = 0
        with self.path.open("rb") as file:
            for data in file:
                try:
                    line = msgspec.json.decode(data, type=_OldLine)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    break
                if not data.endswith(b"\n"):
                    break
                tally.add(line.custom_id, line.response)
                size += len(data)
        os.truncate(self.path, size)

    def append(self, line: ResultLine) -> None:
        """Wholly or, if the disk does not take it, not at all."""
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, self._mode)
            self._size = os.fstat(self._descriptor).st_size
        data = msgspec.json.encode(line) + b"\n"
        try:
            write_all(self._descriptor, data)
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        """Without effect where nothing was written."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


class Results:
    """Good lines in one file and the others in a second one, and what is in both. All methods block."""

    def __init__(self, good: Path, bad: Path, *, mode: int = 0o600) -> None:
        self.tally = Tally()
        self._good = ResultFile(good, mode)
        # one file may hold both
        self._bad = self._good if bad == good else ResultFile(bad, mode)

    def recover(self) -> None:
        for file in {id(file): file for file in (self._good, self._bad)}.values():
            file.recover(self.tally)

    def append(self, line: ResultLine) -> None:
        (self._good if line.is_good else self._bad).append(line)
        self.tally.add(line.custom_id, line.response)

    def close(self) -> None:
        self._good.close()
        self._bad.close()
