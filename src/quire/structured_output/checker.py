"""Whether a form is one, asked by the front before a request starts: in a process of its own, and not for long.

Owns that process, which starts with the first question, and the answers so far. A form that takes too long or too much
memory is refused, and its process killed; the next question starts another. Blocks; called from any thread.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from quire.asked_process import AskedProcess, NotStartedError
from quire.errors import EngineError, RequestError
from quire.structured_output.checking_process import MEMORY_LIMIT
from quire.structured_output.vocabulary import Vocabulary
from quire.structured_outputs_params import StructuredOutputsParams

_SECONDS = 5.0
# Answers are kept by the digest of their question: some hundred bytes each.
_MOST_ANSWERS = 2048
_PROGRAM = "quire.structured_output.checking_process"


class Checker:
    """`vocabulary` is asked for once, when the first form is checked."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], seconds: float = _SECONDS) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        # one thread: compiling must not take the cores from the model
        self._process = AskedProcess(_PROGRAM, self._first, {"RAYON_NUM_THREADS": "1"})
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
        self._process.close()

    def _asked(self, question: bytes, kind: str) -> str:
        """The process' answer. Where it gives none the form is refused, this time: the machine may have been busy."""
        try:
            return self._process.ask([question], self._seconds).decode()
        except TimeoutError:
            raise _refused(kind, f"takes more than {self._seconds:g} s to compile; make it simpler") from None
        except (OSError, EOFError):
            limit = f"{MEMORY_LIMIT >> 20} MiB"
            raise _refused(kind, f"cannot be compiled with {limit} of memory; make it simpler") from None
        except NotStartedError as error:
            raise EngineError(f"structured outputs: the process that checks them does not start ({error}).") from error

    def _first(self) -> list[bytes]:
        return [msgspec.msgpack.encode(self._vocabulary()), msgspec.msgpack.encode(_PROBE)]


def _refused(kind: str, reason: str) -> RequestError:
    return RequestError(f"structured_outputs: {kind}: {reason.rstrip('.')}.", param="structured_outputs")


_PROBE = StructuredOutputsParams(choice=["a"])
