"""Command-line flags of the engine, made from the options' one declaration."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from quire.config.engine_options import EngineOptions
from quire.errors import OptionError
from quire.interfaces.cli.option_flags import add_flags, typed_options


def add_engine_flags(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """One flag an option, grouped by section. Only flags that were typed appear in the result."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="what is logged on stderr; info says what the engine decided and why",
    )
    add_flags(parser, EngineOptions, "engine", leave_out=leave_out)


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
    return typed_options(typed, EngineOptions)
