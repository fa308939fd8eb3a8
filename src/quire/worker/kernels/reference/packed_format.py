"""Packed weights: the header that all homes share, and the plain layout that the reference puts behind it.

A packed weight is a vector of bytes. Its header of 64 bytes is described in `csrc/cpu/matmul.h`. The reference goes on
with the values row by row, as they came (codes of one byte each if they are quantised), then float32 scales [N, G] and,
if there are any, offsets [N, G].
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

_HEADER = struct.Struct("<8siiiIqqiii12x")
HEADER_BYTES = _HEADER.size
_MAGIC = b"QUIREPW\0"
_VERSION = 1
ROWS_LAYOUT = 0
# a dtype, the bits of a whole number, or the 4-bit floats E2M1, of which twice the value is kept as a whole number
FP4 = "fp4"
FORMATS = (torch.float32, torch.bfloat16, torch.float16, 8, 4, FP4, 6)
FP4_VALUES = (-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12)
_HAS_OFFSETS, _IS_WEIGHT_ONLY, _HAS_HALF_SCALES = 1, 2, 4


@dataclass(frozen=True)
class PackedHeader:
    """What a packed weight says about itself."""

    format: torch.dtype | int | str
    num_rows: int
    num_columns: int
    group: int = 0  # inputs that share a scale; 0: all
    zero_point: int = 0  # value = scale * (code - zero_point) + offset
    has_offsets: bool = False
    is_weight_only: bool = False
    layout: int = ROWS_LAYOUT
    has_half_scales: bool = False  # float16 instead of float32

    @property
    def is_quantized(self) -> bool:
        """Whether it holds codes and scales rather than floats."""
        return not isinstance(self.format, torch.dtype)

    @property
    def num_groups(self) -> int:
        """Scales of a row."""
        return self.num_columns // self.group if self.group else 1


def read_header(packed: Tensor) -> PackedHeader:
    """The header of a packed weight of any home."""
    fields = _HEADER.unpack(bytes(packed[:HEADER_BYTES].tolist()))
    # the last one is for layouts of C++ alone
    magic, version, layout, kind, flags, num_rows, num_columns, group, zero_point, _ = fields
    if magic != _MAGIC or version != _VERSION:
        raise ValueError("this is not a packed weight, or it was packed by another version")
    return PackedHeader(
        FORMATS[kind],
        num_rows,
        num_columns,
        group,
        zero_point,
        bool(flags & _HAS_OFFSETS),
        bool(flags & _IS_WEIGHT_ONLY),
        layout,
        bool(flags & _HAS_HALF_SCALES),
    )


def assemble(header: PackedHeader, *pieces: Tensor) -> Tensor:
    """A packed weight of these pieces, one behind the other."""
    flags = _HAS_OFFSETS * header.has_offsets + _IS_WEIGHT_ONLY * header.is_weight_only
    flags += _HAS_HALF_SCALES * header.has_half_scales
    head = _HEADER.pack(
        _MAGIC,
        _VERSION,
        header.layout,
        FORMATS.index(header.format),
        flags,
        header.num_rows,
        header.num_columns,
        header.group,
        header.zero_point,
        0,
    )
    first = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return torch.cat(
        [first.to(pieces[0].device), *(piece.contiguous().flatten().view(torch.uint8) for piece in pieces)]
    )


def dequantized_rows(packed: Tensor, ids_T: Tensor | None = None) -> Tensor:
    """Rows of the weight in float32: all of them, or those that are asked for."""
    header = read_header(packed)
    if header.layout != ROWS_LAYOUT:
        raise ValueError("the weight was packed for kernels that are not loaded in this process")
    shape = (header.num_rows, header.num_columns)
    dtype = header.format if isinstance(header.format, torch.dtype) else torch.uint8
    values_NK, rest = _take(packed[HEADER_BYTES:], shape, dtype)
    values_TK = _select(values_NK, ids_T)
    if not header.is_quantized:
        return values_TK.float()
    scales_NG, rest = _take(rest, (header.num_rows, header.num_groups), torch.float32)
    groups_TGk = (values_TK.float() - header.zero_point).unflatten(1, (header.num_groups, -1))
    weight_TGk = groups_TGk * _select(scales_NG, ids_T)[..., None]
    if header.has_offsets:
        offsets_NG, _ = _take(rest, (header.num_rows, header.num_groups), torch.float32)
        weight_TGk = weight_TGk + _select(offsets_NG, ids_T)[..., None]
    return weight_TGk.flatten(1)


def _take(data: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    piece = data[:num_bytes]
    if piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()  # only views at whole multiples of the type are allowed
    return piece.view(dtype).view(shape), data[num_bytes:]


def _select(rows_N: Tensor, ids_T: Tensor | None) -> Tensor:
    return rows_N if ids_T is None else rows_N[ids_T]
