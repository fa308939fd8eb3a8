"""Vectors as bytes, in the number formats and byte orders that vLLM's clients may ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.interfaces.server.wire.errors import not_one_of

Vector = npt.NDArray[np.float32]
Numbers = npt.NDArray[Any]
LITTLE = "little"
BYTE_ORDERS = (LITTLE, "big", "native")


def _bfloat16(vector: Vector) -> Numbers:
    """The upper half, rounded to the nearest, of two equally near to the even one."""
    bits = vector.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _eight_bits(vector: Vector, num_fraction_bits: int, largest: int) -> Numbers:
    """The nearest; what is beyond the largest number becomes that."""
    middles = _middles(num_fraction_bits, largest)
    return (np.searchsorted(middles, np.abs(vector)) | (np.signbit(vector) << 7)).astype(np.uint8)


@cache
def _middles(num_fraction_bits: int, largest: int) -> Vector:
    """Between neighbours of the numbers that are not negative, whose places in this order are their bits."""
    codes = np.arange(largest + 1)
    steps = 1 << num_fraction_bits
    bias = (1 << (6 - num_fraction_bits)) - 1.0
    exponents = codes // steps
    fractions = codes % steps / steps
    values = np.where(exponents == 0, fractions * 2 ** (1 - bias), (1 + fractions) * 2 ** (exponents - bias))
    return ((values[1:] + values[:-1]) / 2).astype(np.float32)


_FORMATS: dict[str, Callable[[Vector], Numbers]] = {
    "float32": lambda vector: vector,
    "float16": lambda vector: vector.astype(np.float16),
    "bfloat16": _bfloat16,
    "fp8_e4m3": lambda vector: _eight_bits(vector, 3, 0x7E),
    "fp8_e5m2": lambda vector: _eight_bits(vector, 2, 0x7B),
}


def check_format(embed_dtype: str | None, endianness: str | None) -> None:
    for name, value, known in (
        ("embed_dtype", embed_dtype, tuple(_FORMATS)),
        ("endianness", endianness, BYTE_ORDERS),
    ):
        if value is not None and value not in known:
            raise not_one_of(name, value, known)


def as_bytes(vector: Vector, embed_dtype: str | None, endianness: str | None) -> bytes:
    numbers = _FORMATS[embed_dtype or "float32"](np.ascontiguousarray(vector, dtype=np.float32))
    order = sys.byteorder if endianness == "native" else endianness or LITTLE
    return numbers.tobytes() if order == sys.byteorder else numbers.byteswap().tobytes()
