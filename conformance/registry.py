"""The list of checks. A check is a function of a Target that raises what is wrong; its docstring is its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformance.target import Target

Function = Callable[["Target"], None]
CHECKS: list[Check] = []


class Skip(Exception):  # noqa: N818 - no error
    """This check has no meaning for this server, for the reason given."""


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    group: str
    name: str
    run: Function

    @property
    def text(self) -> str:
        return (self.run.__doc__ or self.name).partition("\n")[0].rstrip(".")


def check(function: Function) -> Function:
    """Enters a function; its module is the group."""
    group = function.__module__.rpartition(".")[2]
    CHECKS.append(Check(group, function.__name__, function))
    return function


def check_each(rows: dict[str, object]) -> Callable[[Callable[[Target, object], None]], None]:
    """Enters a function once a row, as `name[row]`. A row is what the function gets as its second argument."""

    def enter(function: Callable[[Target, object], None]) -> None:
        group = function.__module__.rpartition(".")[2]
        for name, row in rows.items():

            def run(target: Target, row: object = row) -> None:
                function(target, row)

            run.__doc__ = f"{(function.__doc__ or '').partition(chr(10))[0].rstrip('.')}: {name}"
            CHECKS.append(Check(group, f"{function.__name__}[{name}]", run))

    return enter


def all_checks() -> list[Check]:
    """Every module of conformance.checks is read."""
    import importlib
    import pkgutil

    from conformance import checks

    for module in sorted(pkgutil.iter_modules(checks.__path__), key=lambda one: one.name):
        importlib.import_module(f"conformance.checks.{module.name}")
    return CHECKS
