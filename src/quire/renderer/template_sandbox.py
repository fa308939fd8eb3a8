"""The Jinja environment in which chat templates run: what they may use, and what they can never reach.

A template comes with a checkpoint, so it is foreign code. It runs in Jinja's immutable sandbox, sees plain data only,
and its output and its strings are bounded. The names and filters are those that Transformers offers, so a template
renders the same text here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARACTERS = 16_000_000
_MAX_REPEATED = 1_000_000
_MAX_EXPONENT = 64


def compile_template(source: str, now: Callable[[], datetime] = datetime.now) -> jinja2.Template:
    """Raises jinja2.TemplateError if the source is no template."""
    return _compile(source, now)


@lru_cache(maxsize=32)
def _compile(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    environment = ChatSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])

    def strftime_now(pattern: str) -> str:
        return now().strftime(pattern)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = strftime_now
    environment.globals["namespace"] = PlainNamespace
    environment.globals["dict"] = _PlainDict()
    return environment.from_string(source)


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with a limit on how much text a template can make."""

    intercepted_binops = frozenset({"*", "**"})

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Jinja joins everything through this: the output, a block, what a macro returns."""
        kept = []
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise SecurityError(f"the template writes more than {MAX_CHARACTERS:,} characters")
            kept.append(piece)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (not isinstance(right, (int, float)) or right > _MAX_EXPONENT):
            raise SecurityError(f"the template raises a number to the power {right}")
        if operator == "*" and max(_repeated_size(left, right), _repeated_size(right, left)) > _MAX_REPEATED:
            raise SecurityError(f"the template repeats a text to more than {_MAX_REPEATED:,} characters")
        return super().call_binop(context, operator, left, right)


def _repeated_size(text: Any, times: Any) -> int:
    return len(text) * times if isinstance(text, (str, list, tuple)) and isinstance(times, int) else 0


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training. Here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PlainNamespace(Namespace):
    """`namespace(...)` without names that begin with an underscore: those lead into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`, which may be a key
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _PlainDict:
    """`dict(...)` as a function: the class itself would offer more than its instances."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not hold {name!r}: names that begin with an underscore are refused")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys; a prompt wants neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
