"""Rotary embedding for positions of several dimensions (M-RoPE): time, height and width of a token of an image.

Each frequency belongs to one dimension. Where all dimensions agree, as they do in text, the angles are those of a plain
position, so text takes the plain way and its bits are the same beside an image and without one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.worker.layers.rotary import RotaryEmbedding, rope_parameters


class MultiRotaryEmbedding(RotaryEmbedding):
    """Takes positions [T], or [3, T] where some tokens of the step are those of images."""

    frequency_axes: Tensor

    @classmethod
    def from_config(cls, config: Any, max_model_len: int, *, is_interleaved: bool = False) -> MultiRotaryEmbedding:
        rotary = super().from_config(config, max_model_len, is_interleaved=is_interleaved)
        assert isinstance(rotary, cls)
        sections = rope_parameters(config).get("mrope_section")
        num_frequencies = rotary.cos_sin_cache.shape[1] // 2
        if not isinstance(sections, list) or len(sections) != 3 or sum(sections) != num_frequencies:
            raise ModelError(
                f"config.json: mrope_section={sections!r} must be three numbers that add up to {num_frequencies}, half "
                "of a head. Take the config.json that belongs to the weights."
            )
        axes = cls._axes_of(sections)
        rotary.register_buffer("frequency_axes", axes.to(torch.get_default_device()), persistent=False)
        return rotary

    @staticmethod
    def _axes_of(sections: list[int]) -> Tensor:
        """The dimension that each frequency belongs to: here one section after another."""
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
        return torch.tensor(axes, device="cpu")

    def forward(self, positions: Tensor, query_TF: Tensor, key_TF: Tensor | None, head_dim: int) -> None:
        if positions.ndim == 1:
            super().forward(positions, query_TF, key_TF, head_dim)
            return
        num_frequencies = len(self.frequency_axes)
        position_TD = positions[self.frequency_axes].T
        column_D = torch.arange(num_frequencies, device=positions.device)
        cos_TD = self.cos_sin_cache[position_TD, column_D]
        sin_TD = self.cos_sin_cache[position_TD, column_D + num_frequencies]
        # a table with a line for each token of the step, which the kernel of plain positions reads in order
        lines_T = torch.arange(positions.shape[1], device=positions.device)
        self._turn(lines_T, query_TF, key_TF, head_dim, torch.cat((cos_TD, sin_TD), dim=1))


class InterleavedMultiRotaryEmbedding(MultiRotaryEmbedding):
    """The dimensions take turns, so that each has quick and slow frequencies; time has what is left at the end."""

    @staticmethod
    def _axes_of(sections: list[int]) -> Tensor:
        axes = torch.zeros(sum(sections), dtype=torch.int64, device="cpu")
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        return axes
