"""Programs of the C++ library: what the operators of a thread do is recorded, and run again without Python."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from quire.worker.kernels.cpu import library


class Program:
    """The recorded steps, for any number of tokens up to the one they were recorded with.

    It knows addresses, not tensors: whoever runs it keeps weights, caches and inputs where they were.
    """

    def __init__(self) -> None:
        self._library: ctypes.CDLL = library.loaded()
        self._address: int | None = None

    @contextmanager
    def recording(self, max_tokens: int, inputs: Sequence[Tensor] = ()) -> Iterator[None]:
        """Operators called inside, on this thread, compute nothing: they become the steps. `inputs`: what these may
        read a row of for each token, [max_tokens, ...]."""
        self._library.quire_record_begin(max_tokens)
        for tensor in inputs:
            self._library.quire_record_input(tensor.data_ptr(), tensor.nbytes // max_tokens)
        try:
            yield
        finally:
            self._address = self._library.quire_record_end()
            weakref.finalize(self, self._library.quire_program_drop, self._address)

    @property
    def address(self) -> int:
        """For other functions of the library."""
        assert self._address is not None, "nothing was recorded"
        return self._address

    def __len__(self) -> int:
        return int(self._library.quire_program_size(self._address))

    @property
    def can_narrow(self) -> bool:
        return bool(self._library.quire_program_can_narrow(self._address))

    def run(self, num_tokens: int, num_sequences: int, wanted_n: Tensor | None = None) -> None:
        """All steps, for so many tokens of so many sequences. `wanted_n`: the tokens whose results are read, rising
        int64 numbers on the CPU; a program that `can_narrow` leaves these results at the beginning, and makes no
        others."""
        wanted = (None, 0) if wanted_n is None else (wanted_n.data_ptr(), len(wanted_n))
        error = self._library.quire_program_run(self._address, num_tokens, num_sequences, *wanted)
        if error is not None:
            raise RuntimeError(error.decode())
