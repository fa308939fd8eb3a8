"""Command-line flags of the engine, made from the options' one declaration."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from quire.config.engine_options import EngineOptions
from quire.errors import OptionError
from quire.interfaces.cli.config_file import add_config
from quire.interfaces.cli.option_flags import add_flags, typed_options
from quire.interfaces.cli.parser import CommandParser
from quire.interfaces.compat.vllm_names import arguments_from_vllm
from quire.observability.logging import FORMATS


def add_engine_flags(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """One flag an option, grouped by section, and a file for all of them. Only what was typed or stands in it appears
    in the result. vLLM's names are understood as well."""
    if isinstance(parser, CommandParser):
        parser.translate = arguments_from_vllm
    add_config(parser)
    add_log_level(parser)
    add_flags(parser, EngineOptions, "engine", leave_out=leave_out)


def add_log_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="what is logged on stderr; info says what the engine decided and why",
    )
    parser.add_argument("--log-format", choices=FORMATS, help="json: an object a line, for programs that collect logs")


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
    names = typed.get("served_model_name", ())
    if len(names) > 1 and "model" not in typed:
        raise OptionError(
            f"served_model_name: is {names[-1]!r} a name, or the model? Give the model first: "
            f"MODEL --served-model-name {' '.join(names)}."
        )
    return typed_options(typed, EngineOptions)
