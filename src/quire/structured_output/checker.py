"""Whether a form is one, asked by the front before a request starts: in a process of its own, and not for long.

Owns that process, which starts with the first question, and the answers so far. A form that takes too long or too much
memory is refused, and its process killed; the next question starts another. Blocks; called from any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from quire.errors import EngineError, RequestError
from quire.structured_output.checking_process import LENGTH_BYTES, MEMORY_LIMIT, write_frame
from quire.structured_output.vocabulary import Vocabulary
from quire.structured_outputs_params import StructuredOutputsParams

_SECONDS = 5.0
# The process imports and reads the vocabulary before it answers for the first time.
_START_SECONDS = 60.0
# Answers are kept by the digest of their question: some hundred bytes each.
_MOST_ANSWERS = 2048
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from quire.structured_output.checking_process import main; main()"
)


class Checker:
    """`vocabulary` is asked for once, when the first form is checked."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], seconds: float = _SECONDS) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: OrderedDict[bytes, str] = OrderedDict()
        self._answers_lock = threading.Lock()
        # held while the process is asked, which may take seconds
        self._lock = threading.Lock()

    def check(self, params: StructuredOutputsParams) -> bool:
        """Raises RequestError, with the reason, for what is no grammar. True if it was not asked lately."""
        if self.is_known(params):
            return False
        question = msgspec.msgpack.encode(params)
        with self._lock:
            # somebody may have asked for it meanwhile
            if self.is_known(params):
                return False
            answer = self._asked(question, params.kind)
            with self._answers_lock:
                self._answers[hashlib.sha256(question).digest()] = answer
                while len(self._answers) > _MOST_ANSWERS:
                    self._answers.popitem(last=False)
        if answer:
            raise _refused(params.kind, answer)
        return True

    def is_known(self, params: StructuredOutputsParams) -> bool:
        """Whether it was asked lately, and is a grammar; RequestError if it is none. Never waits for the process, which
        may be busy with another form."""
        digest = hashlib.sha256(msgspec.msgpack.encode(params)).digest()
        with self._answers_lock:
            answer = self._answers.get(digest)
            if answer is None:
                return False
            self._answers.move_to_end(digest)
        if answer:
            raise _refused(params.kind, answer)
        return True

    def close(self) -> None:
        """Ends the process, also under a question, which is refused then."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _asked(self, question: bytes, kind: str) -> str:
        """The process' answer. Where it gives none the form is refused, this time: the machine may have been busy."""
        process = self._started()
        assert process.stdin is not None
        try:
            write_frame(process.stdin, question)
            return self._read(process, self._seconds).decode()
        except TimeoutError:
            self._end()
            raise _refused(kind, f"takes more than {self._seconds:g} s to compile; make it simpler") from None
        except (OSError, EOFError):
            self._end()
            limit = f"{MEMORY_LIMIT >> 20} MiB"
            raise _refused(kind, f"cannot be compiled with {limit} of memory; make it simpler") from None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        vocabulary = msgspec.msgpack.encode(self._vocabulary())
        # one thread: compiling must not take the cores from the model
        environment = {**os.environ, "RAYON_NUM_THREADS": "1"}
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(sys.path).encode() + b"\n")
            write_frame(process.stdin, vocabulary)
            # The first answer is waited for longer than others are.
            write_frame(process.stdin, msgspec.msgpack.encode(_PROBE))
            self._read(process, _START_SECONDS)
        except (OSError, EOFError) as error:
            self._end()
            raise EngineError(f"structured outputs: the process that checks them does not start ({error}).") from error
        return process

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        """A frame, or TimeoutError."""
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        readable = select.poll()
        readable.register(process.stdout, select.POLLIN)
        data, wanted = b"", LENGTH_BYTES
        while len(data) < wanted:
            left = deadline - time.monotonic()
            if left <= 0 or not readable.poll(left * 1000):
                raise TimeoutError
            part = os.read(process.stdout.fileno(), wanted - len(data))
            if not part:
                raise EOFError("it has ended")
            data += part
            if len(data) == LENGTH_BYTES:
                wanted = LENGTH_BYTES + int.from_bytes(data, "big")
        return data[LENGTH_BYTES:]

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for file in (process.stdin, process.stdout):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        process.wait()


def _refused(kind: str, reason: str) -> RequestError:
    return RequestError(f"structured_outputs: {kind}: {reason.rstrip('.')}.", param="structured_outputs")


_PROBE = StructuredOutputsParams(choice=["a"])
