"""Prompts that are vectors: they stand in the place of what the model's table says of tokens (prompt_embeds).

Owns what may be given: a tensor, an array, or base64 of what torch.save writes; [tokens, width] of finite numbers that
the model's type can hold. Called by the renderer, beside the event loop: there may be many megabytes.
"""

from __future__ import annotations

import binascii
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.errors import RequestError
from quire.messages import Media
from quire.renderer.saved_tensor import Floats, NoTensorError, read_saved_tensor

FIELD = "prompt_embeds"
# stands for a vector among the tokens of a prompt
PLACEHOLDER = 0
_GREATEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}
# of an archive beside its numbers
_MOST_BESIDE = 16 << 10
# float64 in base64
_MOST_CHARACTERS_A_NUMBER = 11


@dataclass(frozen=True)
class PromptVectors:
    """Of a model of this width and type."""

    width: int
    dtype: str

    def media(self, given: Any, max_tokens: int, where: str = FIELD) -> Media:
        """As the worker takes them."""
        numbers = self._checked(self._numbers(given, max_tokens, where), max_tokens, where)
        content = numbers.tobytes()
        return Media(
            start=0,
            length=len(numbers),
            pixels=content,
            shape=list(numbers.shape),
            mean=[],
            std=[],
            grid=[1, 1, len(numbers)],
            merge_size=1,
            content_hash=hashlib.sha256(content).digest(),
            is_vectors=True,
        )

    def _numbers(self, given: Any, max_tokens: int, where: str) -> Floats:
        if isinstance(given, str):
            return self._decoded(given, max_tokens, where)
        if getattr(given, "is_sparse", False) or str(getattr(given, "layout", "")).startswith("torch.sparse"):
            raise _refused(where, "must be dense. Give tensor.to_dense().")
        if hasattr(given, "detach") and given.is_floating_point():  # a tensor of PyTorch, which is not imported here
            given = given.detach().float().cpu().numpy()
        if not isinstance(given, np.ndarray) or given.dtype.kind != "f":
            kind = getattr(given, "dtype", type(given).__name__)
            raise _refused(where, f"must be a tensor of floating-point numbers, not {kind}.")
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(given, dtype=np.float32)

    def _decoded(self, text: str, max_tokens: int, where: str) -> Floats:
        most_numbers = max_tokens * self.width
        if len(text) > most_numbers * _MOST_CHARACTERS_A_NUMBER + 2 * _MOST_BESIDE:
            raise _refused(
                where, f"{len(text)} characters are too many for {max_tokens} tokens of {self.width} numbers."
            )
        try:
            content = binascii.a2b_base64(text.encode("ascii", "replace"), strict_mode=True)
        except ValueError:
            raise _refused(where, "must be base64 of what torch.save writes.") from None
        try:
            return read_saved_tensor(content, most_numbers)
        except NoTensorError as error:
            raise _refused(where, str(error)) from error

    def _checked(self, numbers: Floats, max_tokens: int, where: str) -> Floats:
        shape = list(numbers.shape)
        if numbers.ndim == 3 and shape[0] == 1:
            numbers = numbers[0]
        if numbers.ndim != 2 or not len(numbers) or numbers.shape[1] != self.width:
            raise _refused(where, f"has shape {shape}, must be [tokens, {self.width}], as wide as this model.")
        if len(numbers) > max_tokens:
            raise _refused(where, f"has {len(numbers)} tokens, this model takes {max_tokens}.")
        greatest = _GREATEST.get(self.dtype, _GREATEST["float32"])
        # a number that is none is not below anything
        if not (np.abs(numbers).max() <= greatest):
            raise _refused(where, f"has numbers that are not finite in {self.dtype}.")
        return numbers


def _refused(where: str, why: str) -> RequestError:
    return RequestError(f"{where}: {why}", param=where)
