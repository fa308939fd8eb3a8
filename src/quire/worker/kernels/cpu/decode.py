"""A step of decoding as one call of the library (csrc/cpu/decode.cpp): what it reads, and what came of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from quire.worker.kernels.cpu import library


class DecodeGroup(NamedTuple):
    """Addresses and strides, as DecodeGroup of the library names them."""

    tables: int
    table_stride: int
    batch_tables: int
    batch_table_stride: int
    slots: int
    lengths: int
    starts: int


class DecodeArgs(NamedTuple):
    """Addresses and sizes, as DecodeArgs of the library names them."""

    num_rows: int
    rows: int
    token_ids: int
    token_stride: int
    num_computed: int
    num_total: int
    is_written: int
    adapter_slots: int
    most_total: int
    stops: int
    num_stops: int
    input_ids: int
    positions: int
    batch_adapter_slots: int
    block_size: int
    forward: int
    logits: int
    choice: int
    hidden: int
    hidden_of_logits: int
    hidden_bytes: int
    greatest: int
    tokens: int
    uniform: int
    uniforms: int
    chosen: int
    arrivals: int
    num_groups: int = 0
    groups: int = 0


class DecodeCall:
    """The call with these arguments, again and again: whoever makes it keeps all memory where it is."""

    def __init__(self, args: DecodeArgs, groups: Sequence[DecodeGroup]) -> None:
        self._library: ctypes.CDLL = library.loaded()
        numbers = [number for group in groups for number in group]
        self._groups = (ctypes.c_int64 * len(numbers))(*numbers)
        args = args._replace(num_groups=len(groups), groups=ctypes.addressof(self._groups))
        self._args = (ctypes.c_int64 * len(args))(*args)
        self._num_chosen = ctypes.c_int64()

    def run(self, most: int, nanoseconds: int) -> int:
        """How many tokens each row has got: at most so many, and several only if all of them take no longer. 0: these
        rows are to be computed in another way, and nothing of this counts."""
        error = self._library.quire_decode(self._args, most, nanoseconds, ctypes.byref(self._num_chosen))
        if error is not None:
            raise RuntimeError(error.decode())
        return self._num_chosen.value
