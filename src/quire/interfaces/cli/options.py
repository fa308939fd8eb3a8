"""`quire options`: the reference of all engine options, as docs/options.md holds it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from quire.config.engine_options import EngineOptions
from quire.config.option import Option, options_of
from quire.interfaces.cli.engine_flags import allowed_in_words, default_in_words

_HEADER = """\
# Engine options

Each option is declared once, in `src/quire/config/engine_options.py`; this page is made from there with
`quire options > docs/options.md`, and a test fails when it is out of date. The name is the keyword of `LLM` and
`AsyncLLM`; the flag belongs to `quire serve`, `chat`, `generate` and `bench`. A switch has a second flag with `--no-`.
A dash as default means that nothing is set, and Quire decides where the meaning says so.
"""


_KINDS: dict[type, str] = {Mapping: "a JSON object"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes none."""


def run(arguments: argparse.Namespace) -> int:
    print(markdown(), end="")
    return 0


def markdown() -> str:
    lines = [_HEADER.rstrip()]
    section = None
    for option in options_of(EngineOptions).values():
        if option.section != section:
            section = option.section
            lines += ["", f"## {section}", "", "| name | flag | default | allowed | meaning |", "|---|---|---|---|---|"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(option)) + " |")
    return "\n".join(lines) + "\n"


def _cells(option: Option) -> tuple[str, ...]:
    default = default_in_words(option)
    allowed = "on, off" if option.kind is bool else allowed_in_words(option) or _KINDS.get(option.kind, "a text")
    return f"`{option.name}`", f"`{option.flag}`", default, allowed, option.help
