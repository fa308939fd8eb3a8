"""Command-line flags made from a declaration of options, and the same options as words for a table."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from quire.config.option import Option, options_of
from quire.interfaces.cli.config_file import ElsewhereAction

_KIND_NAMES = {int: "N", float: "X", str: "TEXT", tuple: "TEXT", Mapping: "JSON"}


def add_flags(
    parser: argparse.ArgumentParser, declaration: type, title: str, *, leave_out: Collection[str] = ()
) -> None:
    """One flag an option, grouped by section under `title`. Only flags that were typed appear in the result."""
    groups: dict[str, Any] = {}
    for option in options_of(declaration).values():
        if option.name in leave_out:
            continue
        for part in option.parts:
            parser.add_argument(f"--{part.replace('_', '-')}", dest=part, action=ElsewhereAction, where=option.as_whole)
        if option.is_file_only:
            _add_entry(parser, option)
            continue
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(f"{title}: {option.section}")
        _add_flag(groups[option.section], option)


def typed_options(typed: Mapping[str, Any], declaration: type) -> dict[str, Any]:
    """The options that were typed, each checked against its declaration."""
    return {name: option.check(typed[name]) for name, option in options_of(declaration).items() if name in typed}


def _add_entry(parser: argparse.ArgumentParser, option: Option) -> None:
    is_switch = option.kind is bool
    flags = [option.flag, option.flag.replace("--", "--no-", 1)] if is_switch else [option.flag]
    parser.add_argument(*flags, dest=option.name, action=ElsewhereAction, const="true" if is_switch else None)


def _add_flag(group: Any, option: Option) -> None:
    # percent signs are argparse's own
    text = help_of(option).replace("%", "%%")
    shared: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text}
    if option.kind is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **shared)
    elif option.kind is tuple:
        # a flag that is named for one of them takes one
        takes_several = option.flag == "--" + option.name.replace("_", "-")
        form: dict[str, Any] = {"action": "extend", "nargs": "+"} if takes_several else {"action": "append"}
        group.add_argument(option.flag, metavar=_metavar(option), **form, **shared)
    else:
        group.add_argument(option.flag, metavar=_metavar(option), **shared)


def help_of(option: Option) -> str:
    """Meaning, what is allowed and the default in one line."""
    text = option.help
    # argparse shows choices itself
    if allowed_in_words(option) and not option.choices:
        text += f"; {allowed_in_words(option)}"
    return text if option.default in (None, ()) else f"{text} (default: {default_in_words(option)})"


def allowed_in_words(option: Option) -> str:
    """Choices, or bounds with their unit."""
    if option.choices:
        return ", ".join(option.choices)
    if option.kind is tuple:
        return "may be given several times"
    if option.unit == "bytes":
        return "bytes, or such as 500M, 2GiB"
    unit = f" {option.unit}" if option.unit else ""
    if option.least is not None and option.greatest is not None:
        return f"{option.least} to {option.greatest}{unit}"
    if option.least is not None:
        return f"{option.least} or more{unit}"
    return ""


def default_in_words(option: Option) -> str:
    if option.default in (None, ()):
        return "–"
    if option.kind is bool:
        return "on" if option.default else "off"
    return str(option.default)


def _metavar(option: Option) -> str:
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    return "SIZE" if option.unit == "bytes" else _KIND_NAMES[option.kind]
