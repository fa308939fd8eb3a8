"""The command line: one file a command, each with `add_arguments` and `run`. `quire = quire.interfaces.cli:main`."""

from __future__ import annotations

from collections.abc import Sequence

INTERRUPTED = 130

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code of the process. Whoever presses Ctrl-C is told nothing, whether a command
    runs by then or its code is still being read."""
    try:
        from quire.interfaces.cli import program

        return program.main(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
