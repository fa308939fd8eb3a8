"""The worker's grammars: compiled once, beside the step, and shared by all sequences that follow them.

Owns the tokenizer of the library, a thread that compiles, and the compiled grammars that were used last. The front has
a new form prepared before its request starts, so that no step waits. One that was dropped since is compiled anew when a
sequence gets its row, and needed when its prompt is computed.
"""

from __future__ import annotations

import resource
import time
from collections import OrderedDict
from collections.abc import MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from quire.structured_output.grammar import Form, GrammarError
from quire.structured_output.vocabulary import Vocabulary
from quire.structured_output.walk import Effort, Walk
from quire.structured_outputs_params import StructuredOutputsParams

# Of compiled grammars that nobody may be following. What one takes is not told: it grows with its text, and by what
# the process was seen to grow while it was compiled. Ten words can take 100 MiB.
_MOST_BYTES = 32 * 2**20
_BYTES_EACH = 64 * 2**10
_BYTES_PER_CHARACTER = 16


class Grammars:
    """From forms to walks through their grammars."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._vocabulary: bytes = b""
        self._tokenizer: Any = None
        self._end_ids: frozenset[int] = frozenset()
        self._vocab_size = 0
        self._compiler: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[bytes, Future[Form]] = OrderedDict()
        self._num_bytes = 0
        # by the same keys; written by the thread that compiles
        self._growth: dict[bytes, int] = {}
        # of requests that have rows
        self._efforts: MutableMapping[int, Effort] = WeakValueDictionary()
        # all that were ever compiled, and the time that took; written by the thread that compiles
        self.num_compilations = 0
        self.compile_seconds = 0.0

    @property
    def num_words(self) -> int:
        """Of a mask: a bit for each token, 32 a word."""
        return -(-self._vocab_size // 32)

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    @property
    def num_bytes(self) -> int:
        """An estimate of what compiled grammars take."""
        return self._num_bytes

    def open(self, vocabulary: bytes) -> None:
        """What tokens mean: a Vocabulary as MessagePack. The same once more changes nothing."""
        if vocabulary == self._vocabulary:
            return
        read = msgspec.msgpack.decode(vocabulary, type=Vocabulary)
        self._tokenizer, self._end_ids = read.tokenizer(), frozenset(read.end_ids)
        self._vocab_size = read.size
        self._vocabulary = vocabulary
        self._compiled.clear()
        self._growth.clear()
        self._num_bytes = 0

    def prepare(self, form: bytes) -> bool:
        """Whether these parameters, as MessagePack, are compiled, or cannot be; if not, it has begun."""
        found = self._compiled.get(form)
        if found is None or _is_spent(found):
            found = self._compile(form, msgspec.msgpack.decode(form, type=StructuredOutputsParams))
        return found.done()

    def walk(self, params: StructuredOutputsParams, request_id: int = 0) -> Walk:
        """The way of a new sequence. Whatever is wrong with the grammar shows when its first mask is asked for."""
        key = msgspec.msgpack.encode(params)
        found = self._compiled.get(key)
        if found is None or (found.done() and found.exception() is not None) or _is_spent(found):
            found = self._compile(key, params)
        self._compiled.move_to_end(key)
        effort = self._efforts.get(request_id)
        if effort is None:
            effort = self._efforts[request_id] = Effort()
        return Walk(found, self._end_ids, effort)

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.shutdown(cancel_futures=True)
            self._compiler = None

    def _compile(self, key: bytes, params: StructuredOutputsParams) -> Future[Form]:
        if self._compiler is None:
            self._compiler = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
        self._compiled.pop(key, None)  # the new one is the last to be dropped
        found = self._compiled[key] = self._compiler.submit(self._compile_now, key, params, self._tokenizer)
        self._num_bytes = sum(map(self._size, self._compiled))
        while self._num_bytes > self._most_bytes and len(self._compiled) > 1:
            oldest, _ = self._compiled.popitem(last=False)
            self._num_bytes -= self._size(oldest)
        for dropped in [*self._growth]:
            if dropped not in self._compiled:
                self._growth.pop(dropped, None)
        return found

    def _size(self, key: bytes) -> int:
        return max(self._growth.get(key, 0), _BYTES_EACH + _BYTES_PER_CHARACTER * len(key))

    def _compile_now(self, key: bytes, params: StructuredOutputsParams, tokenizer: Any) -> Form:
        if tokenizer is None:
            raise GrammarError("the engine was told no vocabulary to compile for")
        began = time.perf_counter()
        before = _resident_bytes()
        try:
            form = Form(params, tokenizer)
            _ = form.easy
            return form
        finally:
            self._growth[key] = _resident_bytes() - before
            self.num_compilations += 1
            self.compile_seconds += time.perf_counter() - began


def _is_spent(found: Future[Form]) -> bool:
    return found.done() and found.exception() is None and found.result().is_spent


def _resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
