"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,count:3,deep:{list:[true]}}<tool_call|>`.

Keys are bare, texts stand between marks that do not occur in texts, and everything else is JSON.
"""

from __future__ import annotations

import json
import re

from quire.renderer.output_parsing.answer import Malformed
from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.reader import Reader, Steps

_WORD = re.compile(r"[^\s<>{}\[\]:,]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_MAX_DEPTH = 64


def calls_with_bare_keys(name: str, opening: str, closing: str, quote: str) -> ToolFormat:
    """`quote`: what stands before and behind a text."""
    values = _Values(quote)

    def call(reader: Reader) -> Steps[None]:
        yield from reader.expect("call:")
        function = yield from reader.word(_WORD)
        if not function or (yield from reader.next_letter()) != "{":
            raise Malformed
        reader.start_call(function)
        yield from values.read_object(reader, 1)
        reader.end_call()
        yield from reader.follows(closing)

    return ToolFormat(
        name=name,
        read=lambda reader: reader.attempts((opening,), call),
        marks=(opening, closing, quote),
        is_taught_by=lambda template: opening in template,
    )


class _Values:
    def __init__(self, quote: str) -> None:
        self._quote = quote

    def read_object(self, reader: Reader, depth: int) -> Steps[None]:
        yield from self._read_list(reader, depth, "}", with_keys=True)

    def _read_list(self, reader: Reader, depth: int, closing: str, *, with_keys: bool) -> Steps[None]:
        if depth > _MAX_DEPTH:
            raise Malformed
        reader.arguments(reader.take())
        letter = yield from reader.next_letter()
        while letter != closing:
            if with_keys:
                yield from self._read_key(reader)
            yield from self._read_value(reader, depth)
            letter = yield from reader.next_letter()
            if letter == ",":
                reader.take()
                letter = yield from reader.next_letter()
                # a last comma means nothing
                reader.arguments("" if letter == closing else ", ")
            elif letter != closing:
                raise Malformed
        reader.arguments(reader.take())

    def _read_key(self, reader: Reader) -> Steps[None]:
        if (yield from reader.follows(self._quote)):
            key, _ = yield from reader.text_until((self._quote,))
        else:
            key = yield from reader.word(_WORD)
        if not key:
            raise Malformed
        yield from reader.expect(":")
        reader.arguments(json.dumps(key, ensure_ascii=False) + ": ")

    def _read_value(self, reader: Reader, depth: int) -> Steps[None]:
        letter = yield from reader.next_letter()
        if letter == "{":
            yield from self._read_list(reader, depth + 1, "}", with_keys=True)
        elif letter == "[":
            yield from self._read_list(reader, depth + 1, "]", with_keys=False)
        elif (yield from reader.literal(self._quote)):
            yield from self._read_text(reader)
        else:
            word = yield from reader.word(_WORD, 512)
            if not word:
                raise Malformed
            reader.arguments(word if _SCALAR.fullmatch(word) else json.dumps(word, ensure_ascii=False))

    def _read_text(self, reader: Reader) -> Steps[None]:
        reader.arguments('"')
        mark = yield from reader.until((self._quote,), lambda text: reader.arguments(_inside(text)))
        if mark is None:
            raise Malformed
        reader.arguments('"')


def _inside(text: str) -> str:
    """Of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


FORMAT = calls_with_bare_keys("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
