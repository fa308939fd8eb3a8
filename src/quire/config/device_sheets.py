"""What makers say of their devices, by name: memory as a program finds it, and the rates of a roofline.

`memory_bytes` is what the driver reports, which is less than the name says (an A100 of 40 GB has 39.4 GiB). Rates are
those of dense bfloat16 and of the data sheet; a cost model says which share of them a kernel reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.arithmetic import Machine
from quire.errors import OptionError, suggestion

_GIB = 2**30
_TERA = 1e12


@dataclass(frozen=True)
class DeviceSheet:
    """One device."""

    name: str
    memory_bytes: int
    bytes_per_second: float
    flops: float
    # to its neighbours, in one direction
    link_bytes_per_second: float
    # what the driver's context, the libraries' workspaces and the buffers of collectives take, whatever the model is
    runtime_bytes: int = _GIB

    @property
    def machine(self) -> Machine:
        return Machine(self.flops, self.bytes_per_second)


def _sheet(name: str, gib: float, terabytes_per_second: float, teraflops: float, link_gigabytes: float) -> DeviceSheet:
    return DeviceSheet(
        name, int(gib * _GIB), terabytes_per_second * _TERA, teraflops * _TERA, link_gigabytes * 1e9
    )  # fmt: skip


DEVICE_SHEETS = {
    sheet.name: sheet
    for sheet in (
        _sheet("a100-40gb", 39.39, 1.555, 312, 300),
        _sheet("a100-80gb", 79.15, 2.039, 312, 300),
        _sheet("h100", 79.19, 3.35, 989, 450),
        _sheet("h200", 139.8, 4.8, 989, 450),
        _sheet("b200", 178.4, 8.0, 2250, 900),
        _sheet("mi300x", 191.5, 5.3, 1307, 448),
    )
}


def device_sheet(name: str, others: str = "") -> DeviceSheet:
    """`others`: what may stand in the place of such a name, for the message."""
    sheet = DEVICE_SHEETS.get(name.lower())
    if sheet is None:
        hint = suggestion(name, list(DEVICE_SHEETS)) or ""
        raise OptionError(f"device={name[:40]}: must be one of {', '.join(DEVICE_SHEETS)}{others}.{hint}")
    return sheet
