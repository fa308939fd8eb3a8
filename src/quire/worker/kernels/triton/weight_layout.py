"""How a packed weight lies on a GPU: row by row, as a tile of some outputs and some inputs reads it.

    header    64 bytes, as every home has it (`reference/packed_format.py`), with the number of this layout
    values    [N, pitch]: floats as they are, codes of 8 and of 6 bits as int8, two 4-bit codes a byte
    scales    float32 [G, N], then offsets [G, N] if there are any; groups without offsets have float16 if it holds them

A row is filled up with zeros to a multiple of 128 inputs, the whole to a multiple of 16 bytes. Of 4-bit codes byte j of
16 holds those of the inputs j (lower half) and 16 + j (upper half) of 32. Floats of 4 bits lie there as E2M1.

The header is read once: its tensor remembers what it says, so that no call waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.worker.kernels.reference.packed_format import (
    FP4,
    FP4_VALUES,
    HEADER_BYTES,
    ROWS_LAYOUT,
    PackedHeader,
    assemble,
    read_header,
)
from quire.worker.kernels.reference.packed_linear import QUANTIZED_TOGETHER

TILES_LAYOUT = 2
_NIBBLES = 32
# several weights may lie one behind the other
_ALIGNMENT = 16
# what can be taken from codes of 4 bits within a byte
_MOST_ZERO = 16
_REMEMBERED = "quire_weight_form"


@dataclass(frozen=True)
class WeightForm:
    """What a kernel must know of a packed weight before it is started."""

    header: PackedHeader

    @property
    def kind(self) -> str:
        """`float`, `int8`, `int4` or `fp4`."""
        header = self.header
        if not header.is_quantized:
            return "float"
        if header.format == FP4:
            return FP4
        return "int4" if self.has_two_a_byte else "int8"

    @property
    def has_two_a_byte(self) -> bool:
        """Codes of 4 bits; one of 6 takes a byte, as one of 8 does."""
        return self.header.format in (4, FP4)

    @property
    def pitch(self) -> int:
        """Inputs of a row, with those that fill it up."""
        return -(-self.header.num_columns // QUANTIZED_TOGETHER) * QUANTIZED_TOGETHER

    @property
    def row_bytes(self) -> int:
        if isinstance(self.header.format, torch.dtype):
            return self.pitch * self.header.format.itemsize
        return self.pitch // 2 if self.has_two_a_byte else self.pitch

    @property
    def first_scale(self) -> int:
        """Where scales begin, in bytes."""
        return HEADER_BYTES + self.header.num_rows * self.row_bytes

    @property
    def scale_type(self) -> torch.dtype:
        return torch.float16 if self.header.has_half_scales else torch.float32

    @property
    def num_scale_bytes(self) -> int:
        """With those of offsets."""
        header = self.header
        return self.scale_type.itemsize * (1 + header.has_offsets) * header.num_groups * header.num_rows

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.header.group or self.header.num_columns

    @property
    def zero(self) -> int:
        """A code stands for scale * (stored + zero) + offset."""
        if self.kind == "int8":
            return 128 - self.header.zero_point
        return -self.header.zero_point if self.kind == "int4" else 0

    @property
    def is_rounded(self) -> bool:
        """Whether inputs are rounded to 8 bits."""
        return self.header.is_quantized and not self.header.is_weight_only


def form_of(packed: Tensor) -> WeightForm:
    """The form of a packed weight; waits for the device the first time."""
    form: WeightForm | None = getattr(packed, _REMEMBERED, None)
    if form is None:
        header = read_header(packed)
        if header.layout != TILES_LAYOUT:
            name = "the reference" if header.layout == ROWS_LAYOUT else "the kernels in C++"
            raise ValueError(f"the weight was packed for {name}: pack it on the device that multiplies it")
        form = WeightForm(header)
        setattr(packed, _REMEMBERED, form)
    return form


def pack_weight(weight_NK: Tensor) -> Tensor:
    """A float weight in this layout."""
    num_rows, num_columns = weight_NK.shape
    return _packed(PackedHeader(weight_NK.dtype, num_rows, num_columns, layout=TILES_LAYOUT), weight_NK)


def pack_quantized(
    values_NK: Tensor, scales_NG: Tensor, offsets_NG: Tensor | None, bits: int, weight_only: bool
) -> Tensor:
    """A quantised weight in this layout; see the reference for what the arguments are."""
    is_signed = values_NK.dtype == torch.int8
    is_fp4 = is_signed and bits == 4
    if bits > 4:
        stored_NK = values_NK if is_signed else (values_NK.int() - 128).to(torch.int8)
    else:
        stored_NK = _e2m1(values_NK) if is_fp4 else values_NK
    (num_rows, num_columns), num_groups = values_NK.shape, scales_NG.shape[1]
    zero = None if is_fp4 or offsets_NG is None else _one_zero(scales_NG, offsets_NG)
    if zero is not None:
        offsets_NG = None
    header = PackedHeader(
        FP4 if is_fp4 else bits,
        num_rows,
        num_columns,
        group=0 if num_groups == 1 else num_columns // num_groups,
        zero_point=128 * is_signed + (zero or 0),
        has_offsets=offsets_NG is not None,
        is_weight_only=weight_only,
        layout=TILES_LAYOUT,
        has_half_scales=num_groups > 1 and offsets_NG is None and _fits_half(scales_NG),
    )
    others = [scales_NG] if offsets_NG is None else [scales_NG, offsets_NG]
    scale_type = WeightForm(header).scale_type
    return _packed(header, stored_NK, *(numbers.to(scale_type).t() for numbers in others))


def _fits_half(scales_NG: Tensor) -> bool:
    """Whether float16 keeps 11 bits of each, which is as good as a scale of a group must be."""
    sizes = scales_NG.abs()
    limits = torch.finfo(torch.float16)
    return bool(((sizes == 0) | ((sizes >= limits.smallest_normal) & (sizes <= limits.max))).all())


def _one_zero(scales_NG: Tensor, offsets_NG: Tensor) -> int | None:
    """The code that stands for zero in all groups, if it is one whole number; then offsets need no memory."""
    if not scales_NG.numel() or not scales_NG.flatten()[0]:
        return None
    zero = round(float(-offsets_NG.flatten()[0] / scales_NG.flatten()[0]))
    is_one = 0 <= zero <= _MOST_ZERO and torch.equal(offsets_NG, scales_NG * -float(zero))
    return zero if is_one else None


def _e2m1(values_NK: Tensor) -> Tensor:
    """Codes of 4-bit floats, of which twice the value is given."""
    magnitudes = torch.tensor(sorted(value for value in FP4_VALUES if value >= 0), device=values_NK.device)
    codes_NK = torch.searchsorted(magnitudes, values_NK.abs().long(), out_int32=True)
    if not torch.equal(magnitudes[codes_NK.clamp(max=7)], values_NK.abs().long()):
        raise ValueError("values of 4 bits in int8 must be 0, 1, 2, 3, 4, 6, 8, 12 or their negatives")
    return (codes_NK + 8 * (values_NK < 0)).to(torch.uint8)


def _packed(header: PackedHeader, values_NK: Tensor, *others: Tensor) -> Tensor:
    form = WeightForm(header)
    rows = values_NK.new_zeros((header.num_rows, form.pitch))
    rows[:, : header.num_columns] = values_NK
    if form.has_two_a_byte:
        halves = rows.view(header.num_rows, -1, 2, _NIBBLES // 2)
        rows = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    packed = assemble(header, rows, *others)
    packed = F.pad(packed, (0, -len(packed) % _ALIGNMENT))
    setattr(packed, _REMEMBERED, form)
    return packed


def unpack_weight(packed: Tensor) -> Tensor:
    """The weight that the packed one stands for, float32 [N, K]."""
    return rows_of_weight(packed, None)


def rows_of_weight(packed: Tensor, ids_T: Tensor | None) -> Tensor:
    """Rows of the weight in float32: all of them, or those that are asked for."""
    form = form_of(packed)
    header = form.header
    bytes_Nb = packed[HEADER_BYTES : form.first_scale].view(header.num_rows, -1)
    bytes_Tb = bytes_Nb if ids_T is None else bytes_Nb[ids_T]
    if isinstance(header.format, torch.dtype):
        return bytes_Tb.view(header.format)[:, : header.num_columns].float()
    if form.kind == "int8":
        stored_Tk = bytes_Tb.view(torch.int8).float()
    else:
        halves = bytes_Tb.unflatten(1, (-1, 1, _NIBBLES // 2))
        codes_Tk = torch.cat([halves & 15, halves >> 4], dim=2).flatten(1)
        stored_Tk = _doubled(codes_Tk) if form.kind == FP4 else codes_Tk.float()
    numbers = packed[form.first_scale : form.first_scale + form.num_scale_bytes].view(form.scale_type).float()
    numbers_GN = numbers.view(-1, header.num_groups, header.num_rows)
    numbers_GT = numbers_GN if ids_T is None else numbers_GN[:, :, ids_T]
    groups_TGk = (stored_Tk[:, : header.num_columns] + form.zero).unflatten(1, (header.num_groups, -1))
    weight_TGk = groups_TGk * numbers_GT[0].t()[..., None]
    if header.has_offsets:
        weight_TGk = weight_TGk + numbers_GT[1].t()[..., None]
    return weight_TGk.flatten(1)


def _doubled(codes: Tensor) -> Tensor:
    """Twice the values of 4-bit floats."""
    of_code = [value for value in FP4_VALUES if value >= 0]
    return torch.tensor([*of_code, *(-value for value in of_code)], device=codes.device).float()[codes.long()]


def step_of(form: WeightForm) -> int:
    """Inputs that are multiplied at once: within one group and one scale of the inputs. 0: groups are too odd."""
    if form.kind == "float" or form.header.num_groups == 1:
        return 64 if form.kind == "float" else QUANTIZED_TOGETHER
    step = math.gcd(form.group, QUANTIZED_TOGETHER)
    return step if step >= _NIBBLES else 0
