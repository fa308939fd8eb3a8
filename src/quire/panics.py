"""Panics of libraries written in Rust become errors.

tokenizers, llguidance and safetensors raise a panic as an exception that is no `Exception`, so that nothing that
catches errors catches it, and a thread or a server ends. Where such a library is given data of others, it is called in

    with panics_are_errors:
        ...
"""

from __future__ import annotations

from types import TracebackType

from quire.errors import one_line

_NAME = "PanicException"


class PanicError(Exception):
    """A library has found itself in a state that it did not foresee. What it was working on is lost, nothing else."""


class _Wall:
    """Holds nothing, so one serves all threads."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and type(error).__name__ == _NAME:
            raise PanicError(one_line(error)) from error


panics_are_errors = _Wall()
