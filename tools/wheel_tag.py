"""The name of the wheel: one that brings compiled kernels is for this kind of machine, one without is for any.

The name holds the oldest C library that will do: what the kernels themselves need, and torch's own wheels.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# glibc 2.28: torch's wheels are manylinux_2_28
_OF_TORCH = 28


def oldest_glibc(libraries: Iterable[Path]) -> int:
    """The second part of its version. What a library needs of glibc stands in its table of strings, a version each."""
    found = [re.findall(rb"\0GLIBC_2\.(\d+)(?:\.\d+)?(?=\0)", library.read_bytes()) for library in libraries]
    return max([_OF_TORCH, *(int(number) for numbers in found for number in numbers)])


class WheelTag(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        libraries = list(Path(self.root).glob("src/quire/csrc/cpu/prebuilt/*.so"))
        if not libraries:
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{oldest_glibc(libraries)}_{platform.machine()}"
