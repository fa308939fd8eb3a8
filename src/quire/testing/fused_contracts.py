"""What every home of the small operations must do; see `kernel_contracts.py`, which has those on the KV cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.testing.kernel_contracts import assert_close
from quire.worker.kernels import reference

# (rows, width); None: [T, H, D] as a slice of a fused projection, the norm of each head.
WIDTHS = ((1, 64), (3, 80), (5, 7), (2, 2048), (70, 1024), (0, 32))


def _rows(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """A slice with gaps between the rows."""
    wide = torch.randn(*shape[:-1], shape[-1] + 8, generator=torch.Generator().manual_seed(seed))
    return wide.to(dtype)[..., 8:]


def check_norms(kernels: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """rms_norm and add_rms_norm; the sum must be exact, the norm within a unit in the last place."""
    for shape in (*WIDTHS, (6, 4, 64), (2, 3, 4, 16), (40,)):
        x, residual = _rows(shape, dtype, 1).to(device), (_rows(shape, dtype, 2) * 3).to(device)
        weight = _rows(shape[-1:], dtype, 3).to(device).contiguous()
        assert_close(kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), factor=2)
        normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
        expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, expected_total)
        assert_close(normed, expected, factor=2)


def check_gated_norms(kernels: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Both orders; one weight for all rows, and one for each row of a token; gates far from zero too."""
    for shape in (*WIDTHS, (6, 4, 64), (5, 3, 7)):
        x, gate = _rows(shape, dtype, 1).to(device), (_rows(shape, dtype, 2) * 20).to(device)
        for weight_shape in (shape[-1:], shape[-2:] if len(shape) == 3 else shape[-1:]):
            weight = _rows(weight_shape, dtype, 3).to(device).contiguous()
            for gates_first in (False, True):
                result = kernels.gated_rms_norm(x, gate, weight, 1e-6, gates_first)
                expected = reference.gated_rms_norm(x, gate, weight, 1e-6, gates_first)
                assert result.is_contiguous()
                # products of values of some twenty: the bound is relative to the greatest
                size = float(expected.abs().max()) if expected.numel() else 1.0
                assert_close(result / max(size, 1.0), expected / max(size, 1.0), factor=4)


def check_conversions(kernels: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Exactly what PyTorch does, NaN and infinities included."""
    for shape in WIDTHS:
        x = (_rows(shape, dtype, 4) * 100).to(device)
        if x.shape[0]:
            x[0, ..., :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        for other in (torch.float32, torch.bfloat16, torch.float16):
            result = kernels.convert(x, other)
            assert result.is_contiguous()
            assert torch.equal(result.nan_to_num(7.0), x.to(other).nan_to_num(7.0))
        for is_division in (False, True):
            found = kernels.scale(x, 0.22, is_division)
            assert torch.equal(found.nan_to_num(7.0), reference.scale(x, 0.22, is_division).nan_to_num(7.0))


def check_silu_and_mul(kernels: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Also far from zero, where exp of float32 overflows."""
    for rows, width in WIDTHS:
        x = (_rows((rows, 2 * width), dtype, 4) * 20).to(device)
        assert_close(kernels.silu_and_mul(x), reference.silu_and_mul(x), factor=2)


def check_clamped_swiglu(kernels: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Values on both sides of the limit, rows of one expert and of several; NaN stays what it is."""
    for shape in (*WIDTHS, (6, 3, 50)):
        x = (_rows((*shape[:-1], 2 * shape[-1]), dtype, 4) * 10).to(device)
        assert_close(kernels.clamped_swiglu(x, 1.702, 7.0), reference.clamped_swiglu(x, 1.702, 7.0), factor=2)
    assert kernels.clamped_swiglu(torch.full((1, 40), torch.nan, dtype=dtype, device=device), 1.0, 7.0).isnan().all()


def check_rotary_embedding(kernels: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Query and key are slices of one fused tensor; dimensions beyond the rotary ones and the rest stay as they are."""
    shapes = ((64, 64), (80, 32), (128, 128), (96, 24), (16, 4))
    for (head_dim, rotary_dim), is_interleaved in itertools.product(shapes, (False, True)):
        angle = torch.arange(50)[:, None] / 100 ** (torch.arange(rotary_dim // 2) / rotary_dim)
        cos_sin = torch.cat((angle.cos(), angle.sin()), -1).to(device)
        for positions in (torch.tensor([0, 49, 7, 7]), torch.tensor([], dtype=torch.int64)):
            mine = torch.randn(len(positions), 9, head_dim, generator=torch.Generator().manual_seed(5)).to(dtype)
            mine, theirs = mine.to(device), mine.clone().to(device)
            kernels.rotary_embedding(positions.to(device), mine[:, :5], mine[:, 5:8], cos_sin, is_interleaved)
            reference.rotary_embedding(positions.to(device), theirs[:, :5], theirs[:, 5:8], cos_sin, is_interleaved)
            assert_close(mine, theirs)
            assert torch.equal(mine[:, 8], theirs[:, 8])
            assert torch.equal(mine[..., rotary_dim:], theirs[..., rotary_dim:])


def check_join(kernels: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Slices of wider tensors, of two and of three dimensions: one, two, three of them."""
    for shape in ((3,), (0,), (5, 4), (5, 1)):
        x, y = _rows((*shape, 24), dtype, 6).to(device), _rows((*shape, 7), dtype, 7).to(device)
        for tensors in ([x, y], [x], [y, x, y]):
            joined = kernels.join(tensors)
            assert joined.is_contiguous()
            assert torch.equal(joined, torch.cat(tensors, -1))
