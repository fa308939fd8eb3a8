"""Command-line flags of the engine, made from the options' one declaration."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from quire.config.engine_options import EngineOptions
from quire.config.option import Option, options_of
from quire.errors import OptionError

_KIND_NAMES = {int: "N", float: "X", str: "TEXT", Mapping: "JSON"}


def add_engine_flags(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """One flag an option, grouped by section. Only flags that were typed appear in the result."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="what is logged on stderr; info says what the engine decided and why",
    )
    groups: dict[str, Any] = {}
    for option in options_of(EngineOptions).values():
        if option.name in leave_out:
            continue
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(f"engine: {option.section}")
        _add_flag(groups[option.section], option)


def _add_flag(group: Any, option: Option) -> None:
    # percent signs are argparse's own
    text = help_of(option).replace("%", "%%")
    shared: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text}
    if option.kind is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **shared)
    else:
        group.add_argument(option.flag, metavar=_metavar(option), **shared)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """`quire serve MODEL`: the model without a flag."""
    parser.add_argument(
        "model_argument",
        metavar="MODEL",
        nargs="?",
        help="directory or hub name; the model that ships with Quire if left out",
    )


def engine_options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that were typed, each checked against its declaration."""
    typed = vars(arguments)
    model = typed.get("model_argument")
    if model is not None:
        if typed.get("model", model) != model:
            raise OptionError(f"model: both {model!r} and --model {typed['model']!r} were given. Give one of them.")
        typed = {**typed, "model": model}
    return {name: option.check(typed[name]) for name, option in options_of(EngineOptions).items() if name in typed}


def help_of(option: Option) -> str:
    """Meaning, what is allowed and the default in one line."""
    text = option.help
    # argparse shows choices itself
    if allowed_in_words(option) and not option.choices:
        text += f"; {allowed_in_words(option)}"
    return text if option.default is None else f"{text} (default: {default_in_words(option)})"


def allowed_in_words(option: Option) -> str:
    """Choices, or bounds with their unit."""
    if option.choices:
        return ", ".join(option.choices)
    if option.unit == "bytes":
        return "bytes, or such as 500M, 2GiB"
    unit = f" {option.unit}" if option.unit else ""
    if option.least is not None and option.greatest is not None:
        return f"{option.least} to {option.greatest}{unit}"
    if option.least is not None:
        return f"{option.least} or more{unit}"
    return ""


def default_in_words(option: Option) -> str:
    if option.default is None:
        return "–"
    if option.kind is bool:
        return "on" if option.default else "off"
    return str(option.default)


def _metavar(option: Option) -> str:
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    return "SIZE" if option.unit == "bytes" else _KIND_NAMES[option.kind]
