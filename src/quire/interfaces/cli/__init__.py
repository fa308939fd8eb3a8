"""The command line: one file a command, each with `add_arguments` and `run`. `quire = quire.interfaces.cli:main`."""

from quire.interfaces.cli.program import main

__all__ = ["main"]
