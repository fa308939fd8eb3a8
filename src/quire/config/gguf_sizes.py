"""What the matrices of a GGUF file weigh once they are loaded, from its head alone.

Owns the table of what each type becomes, and the rules by which a layer takes one form: of layers that are multiplied
as one (query, key and value; gate and up) the parts get the form that holds them all. Called by `weight_sizes.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from quire.config.arithmetic import FLOAT_BYTES
from quire.config.gguf_file import GGUFFile, GGUFTensor
from quire.config.latent_shape import LatentShape

_SCALE_BYTES = 2
# of a row without groups
_ROW_SCALE_BYTES = 4
_LEAST_GROUP_OF_4_BITS = 32


@dataclass(frozen=True)
class Form:
    """How a packed layer holds its numbers. `zero_point`: None if groups have offsets of their own."""

    bits: int
    group: int
    zero_point: int | None = 0
    are_floats: bool = False

    def bytes_of_a_weight(self, num_inputs: int) -> float:
        has_rows = self.bits == 8 and self.group == num_inputs and self.zero_point is not None
        scale = _ROW_SCALE_BYTES if has_rows else _SCALE_BYTES
        return self.bits / 8 + scale * (2 if self.zero_point is None else 1) / self.group


# types that are not here become floats
_FORMS = {
    "Q4_0": Form(4, 32, 8), "Q4_1": Form(4, 32, None), "Q4_K": Form(4, 32, None), "Q5_0": Form(6, 32),
    "Q5_1": Form(6, 32, None), "Q5_K": Form(6, 32, None), "Q8_0": Form(8, 32), "Q6_K": Form(6, 16), "Q3_K": Form(6, 16),
    "Q2_K": Form(6, 16, None), "IQ4_NL": Form(8, 32), "IQ4_XS": Form(8, 32), "MXFP4": Form(4, 32, are_floats=True),
}  # fmt: skip
_LAYER = re.compile(r"(blk\.\d+)\.(attn_[qkv]|ffn_(?:gate|up)(_exps|_shexp|\.\d+)?)\.weight")
_EXPERTS = re.compile(r"blk\.\d+\.ffn_(?:gate|up|gate_up|down)(?:_exps|\.\d+)\.weight")
# they are small, and a wrong one sends a token elsewhere
_NEVER_ROUNDED = ("ffn_gate_inp", "ffn_gate_inp_shexp")


@dataclass(frozen=True)
class _Matrix:
    """Weights of one form; None: floats."""

    name: str
    num_weights: int
    num_inputs: int
    form: Form | None

    def num_bytes(self, dtype: str) -> float:
        size = float(FLOAT_BYTES[dtype]) if self.form is None else self.form.bytes_of_a_weight(self.num_inputs)
        return self.num_weights * size


def gguf_bytes(file: GGUFFile, latent: LatentShape | None, dtype: str, scheme: str | None) -> int:
    """All matrices."""
    return int(sum(matrix.num_bytes(dtype) for matrix in _loaded(file, latent, scheme)))


def gguf_expert_bytes(file: GGUFFile, dtype: str, scheme: str | None) -> float:
    """Of them, those of experts."""
    matrices = _loaded(file, None, scheme)
    return sum(matrix.num_bytes(dtype) for matrix in matrices if _EXPERTS.fullmatch(matrix.name))


def gguf_embedding_bytes(file: GGUFFile, dtype: str) -> float:
    return _matrix(file.tensors["token_embd.weight"]).num_bytes(dtype)


def scheme_form(scheme: str, num_inputs: int, *, is_head: bool = False) -> Form:
    """What a scheme makes of floats."""
    if not scheme.startswith("int4") or num_inputs % _LEAST_GROUP_OF_4_BITS:
        return Form(8, num_inputs)
    return Form(6, _LEAST_GROUP_OF_4_BITS) if is_head else Form(4, _LEAST_GROUP_OF_4_BITS, 8)


def _loaded(file: GGUFFile, latent: LatentShape | None, scheme: str | None) -> Iterator[_Matrix]:
    """Every matrix in the form in which it is multiplied."""
    matrices = sorted(_matrices(file, latent), key=lambda matrix: _merged_name(matrix.name))
    for _, parts in groupby(matrices, key=lambda matrix: _merged_name(matrix.name)):
        rounded = [matrix if scheme is None else _rounded(matrix, file, scheme) for matrix in parts]
        form = _joined([matrix.form for matrix in rounded])
        for matrix in rounded:
            yield _Matrix(matrix.name, matrix.num_weights, matrix.num_inputs, form)


def _matrices(file: GGUFFile, latent: LatentShape | None) -> Iterator[_Matrix]:
    for tensor in file.tensors.values():
        if len(tensor.shape) < 2 or not tensor.name.endswith(".weight"):
            continue
        matrix = _matrix(tensor)
        if latent is None or not tensor.name.endswith(".attn_kv_b.weight"):
            yield matrix
            continue
        # a file of before the halves were two tensors: keys are turned, which makes them floats
        heads = matrix.num_weights // matrix.num_inputs // (latent.qk_nope_head_dim + latent.v_head_dim)
        keys = heads * latent.qk_nope_head_dim * matrix.num_inputs
        yield _Matrix(f"{tensor.name}.keys", keys, latent.qk_nope_head_dim, None)
        yield _Matrix(f"{tensor.name}.values", matrix.num_weights - keys, matrix.num_inputs, matrix.form)


def _matrix(tensor: GGUFTensor) -> _Matrix:
    return _Matrix(tensor.name, tensor.num_elements, tensor.shape[-1], _FORMS.get(tensor.type_name))


def _merged_name(name: str) -> str:
    """The layer that a matrix is a part of."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    kind = "attn_qkv" if match.group(2).startswith("attn") else "ffn_gate_up"
    return f"{match.group(1)}.{kind}{match.group(3) or ''}"


def _rounded(matrix: _Matrix, file: GGUFFile, scheme: str) -> _Matrix:
    """As the scheme makes it: codes stay where they have as many bits as it gives, or fewer."""
    name = matrix.name.removesuffix(".weight")
    is_looked_up = name == "token_embd" and "output.weight" in file.tensors
    if is_looked_up or name.rpartition(".")[2] in _NEVER_ROUNDED:
        return matrix
    is_head = name in ("output", "token_embd")
    most = (6 if is_head else 4) if scheme.startswith("int4") else 8
    if matrix.form is not None and matrix.form.bits <= most:
        return matrix
    form = scheme_form(scheme, matrix.num_inputs, is_head=is_head)
    return _Matrix(matrix.name, matrix.num_weights, matrix.num_inputs, form)


def _joined(forms: list[Form | None]) -> Form | None:
    """The form that holds all of them."""
    kept = [form for form in forms if form is not None]
    if len(kept) < len(forms):
        return None
    group = math.gcd(*[form.group for form in kept])
    are_alike = len({(form.bits, form.are_floats) for form in kept}) == 1
    has_4_bits = are_alike and kept[0].bits == 4 and group >= _LEAST_GROUP_OF_4_BITS
    zero_points = {form.zero_point for form in kept}
    return Form(
        bits=4 if has_4_bits else max(6, *(form.bits for form in kept)),
        group=group,
        zero_point=zero_points.pop() if len(zero_points) == 1 else None,
        are_floats=has_4_bits and kept[0].are_floats,
    )
