"""The tensors of one module of a quantised checkpoint, and the errors that its reader may have to raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from quire.errors import ModelError


class StoredModule:
    """The tensors of one module of the checkpoint, by the last part of their names."""

    def __init__(self, name: str, leaves: dict[str, str], read: Callable[[str], Tensor]) -> None:
        self.name = name
        self.leaves = leaves
        self._read = read

    def get(self, leaf: str) -> Tensor:
        if leaf not in self.leaves:
            raise ModelError(
                f"{self.name}: no {leaf} beside {', '.join(sorted(self.leaves))}, which a quantised layer needs. "
                "Download the checkpoint again."
            )
        return self._read(self.leaves[leaf])

    def find(self, leaf: str) -> Tensor | None:
        return self._read(self.leaves[leaf]) if leaf in self.leaves else None

    def check(self, is_right: bool, leaf: str, tensor: Tensor, wanted: str) -> None:
        if not is_right:
            raise ModelError(
                f"{self.name}.{leaf}: {list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}, expected is "
                f"{wanted}. config.json and the weights do not belong together; download the checkpoint again."
            )


def unsupported(field: str, value: Any, supported: Any) -> ModelError:
    """A setting of the checkpoint that is not read."""
    return ModelError(
        f"config.json: quantization_config: {field}={value!r} is not supported, only "
        f"{', '.join(str(one) for one in supported)}. Take the model in one of them, or not quantised, with "
        "quantization=int8 or int4."
    )
