"""Masters: the numbers that an optimizer changes, and the weights of the model that are made of them.

A packed weight has one in float32 (or whatever is asked for); a parameter that is not packed is its own master where
the types agree, and else hands its gradient on. `pack` writes what has changed into the model, in place: whoever knows
where a weight lies (a recorded program, a tied embedding) sees the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker import kernels
from quire.worker.kernels.reference.packed_format import read_header
from quire.worker.layers.latent import HeadLinear
from quire.worker.training.products import stand_for


@dataclass
class _Master:
    parameter: nn.Parameter
    # writes its numbers into the model
    write: Callable[[Tensor], None]
    # of the parameter, when it was written last
    version: int = 0


class Masters:
    """Of one model, by the names of its parameters."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._by_name: dict[str, _Master] = {}
        by_address: dict[int, nn.Parameter] = {}
        for path, module in model.named_modules():
            packed = module._buffers.get("packed")
            if packed is not None:
                known = by_address.get(packed.data_ptr())
                master = known if known is not None else self._of_packed(f"{path}.weight", module, packed)
                by_address[packed.data_ptr()] = master
                _stand_for_all(module, packed, master)
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.numel() and parameter.is_floating_point() and parameter.data_ptr() not in by_address:
                    by_address[parameter.data_ptr()] = parameter
                    self._by_name[f"{path}.{leaf}"] = self._of_plain(parameter)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, master in self._by_name.items():
            yield name, master.parameter

    @torch.no_grad()
    def pack(self) -> int:
        """Brings what has changed since the last call into the model; how many weights that were."""
        changed = [master for master in self._by_name.values() if master.parameter._version != master.version]
        for master in changed:
            master.write(master.parameter.detach())
            master.version = master.parameter._version
        return len(changed)

    def _of_packed(self, name: str, module: nn.Module, packed: Tensor) -> nn.Parameter:
        pieces = _pieces(module, packed)
        header = read_header(pieces[0])
        if header.is_quantized or not isinstance(header.format, torch.dtype):
            raise ModelError(
                f"{name}: is quantised, and codes cannot be trained. Train an adapter over it (lora=...), or leave "
                "quantization out."
            )
        served = header.format
        numbers = torch.cat([kernels.unpack_weight(piece) for piece in pieces])
        parameter = nn.Parameter(numbers.to(self._dtype))

        def write(values: Tensor) -> None:
            for piece, rows in zip(pieces, values.to(served).chunk(len(pieces)), strict=True):
                piece.copy_(kernels.pack_weight(rows.contiguous()))

        self._by_name[name] = _Master(parameter, write, parameter._version)
        return parameter

    def _of_plain(self, parameter: nn.Parameter) -> _Master:
        parameter.requires_grad_(True)
        if parameter.dtype == self._dtype:
            return _Master(parameter, lambda values: None, parameter._version)
        master = nn.Parameter(parameter.detach().to(self._dtype))

        def hand_on(served: Tensor) -> None:
            assert served.grad is not None
            gradient = served.grad.to(self._dtype)
            master.grad = gradient if master.grad is None else master.grad + gradient
            served.grad = None

        parameter.register_post_accumulate_grad_hook(hand_on)
        return _Master(master, lambda values: parameter.data.copy_(values), master._version)


def _pieces(module: nn.Module, packed: Tensor) -> list[Tensor]:
    return module.packed_heads if isinstance(module, HeadLinear) else [packed]


def _stand_for_all(module: nn.Module, packed: Tensor, master: nn.Parameter) -> None:
    pieces = _pieces(module, packed)
    if pieces[0] is packed:
        stand_for(packed, lambda: master)
        return
    height = master.shape[0] // len(pieces)
    for number, piece in enumerate(pieces):
        stand_for(piece, partial(master.narrow, 0, number * height, height))
