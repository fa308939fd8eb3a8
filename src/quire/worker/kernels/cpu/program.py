"""Programs of the C++ library: what the operators of a thread do is recorded, and run again without Python."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from quire.worker.kernels.cpu import library


class Program:
    """The recorded steps, for any number of tokens up to the one they were recorded with.

    It knows addresses, not tensors: whoever runs it keeps weights, caches and inputs where they were.
    """

    def __init__(self) -> None:
        self._library: ctypes.CDLL = library.loaded()
        self._address: int | None = None

    @contextmanager
    def recording(self, max_tokens: int) -> Iterator[None]:
        """Operators called inside, on this thread, compute nothing: they become the steps."""
        self._library.quire_record_begin(max_tokens)
        try:
            yield
        finally:
            self._address = self._library.quire_record_end()
            weakref.finalize(self, self._library.quire_program_drop, self._address)

    def __len__(self) -> int:
        return int(self._library.quire_program_size(self._address))

    def run(self, num_tokens: int, num_sequences: int) -> None:
        """All steps, for so many tokens of so many sequences."""
        error = self._library.quire_program_run(self._address, num_tokens, num_sequences)
        if error is not None:
            raise RuntimeError(error.decode())
