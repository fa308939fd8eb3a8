"""`quire options`: the reference of all options, as docs/options.md holds it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from quire.config.engine_options import EngineOptions
from quire.config.option import Option, options_of
from quire.interfaces.cli.option_flags import allowed_in_words, default_in_words
from quire.interfaces.deploy.route_options import RouteOptions
from quire.interfaces.server.options import ServerOptions

_HEADER = """\
# Options

Each option is declared once: those of the engine in `src/quire/config/engine_options.py`, those of the server in
`src/quire/interfaces/server/options.py`. This page is made from there with `quire options > docs/options.md`, and a
test fails when it is out of date. The name of an engine option is a keyword of `LLM` and `AsyncLLM`; its flag belongs
to the [commands](cli.md) that make an engine. An option of the server is a keyword of `run_server` and a flag of
`quire serve`; one of the front is a flag of `quire route`. A switch has a second flag with `--no-`. A dash as default
means that nothing is set, and Quire decides where the meaning says so.

All of them can stand in the YAML file of `--config`, by their names: `max_model_len: 4096`. The rarest of the engine's
have no flag, so that `--help` stays short: that file sets them, or a keyword.
"""


_KINDS: dict[type, str] = {Mapping: "a JSON object"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes none."""


def run(arguments: argparse.Namespace) -> int:
    print(markdown(), end="")
    return 0


def markdown() -> str:
    declarations = {"engine": EngineOptions, "server": ServerOptions, "front": RouteOptions}
    tables = [line for title, declaration in declarations.items() for line in _tables(declaration, title)]
    lines = [_HEADER.rstrip(), *tables]
    return "\n".join(lines) + "\n"


def _tables(declaration: type, title: str) -> Iterator[str]:
    """One a section, and one of those without a flag."""
    options = options_of(declaration).values()
    section = None
    for option in (option for option in options if not option.is_file_only):
        if option.section != section:
            section = option.section
            yield from _head(f"{title}: {section}", "flag")
        yield _row(f"`{option.flag}`", option)
    rare = [option for option in options if option.is_file_only]
    if rare:
        yield from _head(f"{title}: in the file of --config only", "section")
    for option in rare:
        yield _row(option.section, option)


def _head(title: str, second: str) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    yield from (f"| name | {second} | default | allowed | meaning |", "|---|---|---|---|---|")


def _row(second: str, option: Option) -> str:
    cells = (f"`{option.name}`", second, *_values_of(option), option.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _values_of(option: Option) -> tuple[str, str]:
    """The default, and what is allowed."""
    default = default_in_words(option)
    allowed = "on, off" if option.kind is bool else allowed_in_words(option) or _KINDS.get(option.kind, "a text")
    return default, allowed
