"""argparse with Quire's manners: an unknown flag is answered with the one that was meant, errors are exceptions.

Flags may be typed with dashes or underscores (--max-model-len, --max_model_len).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from quire.errors import OptionError, suggestion


class CommandParser(argparse.ArgumentParser):
    """Parser of one command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **settings)

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        found, unknown = self.parse_known_args(_with_dashes(args))
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                raise OptionError(f"{self.prog}: one argument too many: {unknown[0]!r}.")
            known = [flag for action in self._actions for flag in action.option_strings]
            hint = suggestion(name, known) or f" {self.prog} --help lists all."
            raise OptionError(f"{name}: {self.prog} has no such option.{hint}")
        return found

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message[0].upper()}{message[1:]}. See {self.prog} --help.")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def _with_dashes(args: Sequence[str]) -> list[str]:
    """Underscores in the names of flags become dashes; values and what follows `--` stay as they are."""
    changed: list[str] = []
    for number, arg in enumerate(args):
        if arg == "--":
            return [*changed, *args[number:]]
        name, equals, value = arg.partition("=")
        changed.append(name.replace("_", "-") + equals + value if name.startswith("--") else arg)
    return changed
