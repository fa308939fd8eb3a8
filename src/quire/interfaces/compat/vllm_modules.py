"""A stand-in for the package vllm: any of its modules, with the names that quire.vllm has."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Module(types.ModuleType):
    """Any module of vllm."""

    names: types.ModuleType
    # looked for as names and not there: `from vllm.utils import f` then asks for a module f, and there is none either
    missing: set[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(self.names, name)
        except AttributeError:
            self.missing.add(name)
            raise AttributeError(
                f"{self.__name__}.{name}: quire.vllm has nothing of this name (docs/coming-from.md says what it has)."
            ) from None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: types.ModuleType) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "vllm" and not name.startswith("vllm."):
            return None
        parent, _, last = name.rpartition(".")
        if last in getattr(sys.modules.get(parent), "missing", ()):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.names = self._names
        module.missing = set()
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Names are looked up when they are asked for."""


def stand_in(names: types.ModuleType) -> None:
    """`import vllm` finds what `names` has, from now on, in this process and those that import it again."""
    sys.meta_path.insert(0, _Finder(names))
