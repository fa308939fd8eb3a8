"""Llama 4, and 3.2 in its authors' prompts: an answer that is nothing but calls as Python writes them, `[f(x=1), g()]`.

Literals alone, read letter by letter and written down as JSON; nothing is evaluated. The list may stand between
`<|python_start|>` and `<|python_end|>`. Only calls of the request's own tools are calls.
"""

from __future__ import annotations

import json
import re

from quire.renderer.output_parsing.answer import Malformed
from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.reader import Reader, Steps
from quire.renderer.tool_parsers.llama3_json import TAUGHT

_OPEN, _CLOSE = "<|python_start|>", "<|python_end|>"
_MAX_DEPTH = 64
_WORD = re.compile(r"[A-Za-z0-9_.]+")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[-+.0-9A-Za-z_]+")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN = {'"': re.compile(r'[^"\\\n]+'), "'": re.compile(r"[^'\\\n]+")}
_HEX = re.compile(r"[0-9a-fA-F]+")
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}


def _read(reader: Reader) -> Steps[None]:
    yield from reader.attempt("", _calls(reader))


def _calls(reader: Reader) -> Steps[None]:
    yield from reader.follows(_OPEN)
    yield from read_python_calls(reader)
    yield from reader.follows(_CLOSE)


def read_python_calls(reader: Reader) -> Steps[None]:
    """A list of calls, at least one."""
    yield from reader.expect("[")
    while True:
        yield from read_python_call(reader)
        if (yield from _is_last(reader, "]")):
            break


def read_python_call(reader: Reader) -> Steps[None]:
    yield from reader.next_letter()
    name = yield from reader.word(_WORD)
    if name not in reader.functions:
        raise Malformed
    yield from reader.expect("(")
    is_empty = (yield from reader.next_letter()) == ")"
    key = "" if is_empty else (yield from _keyword(reader))
    reader.start_call(name)
    reader.arguments("{")
    if is_empty:
        reader.take()
    while not is_empty:
        reader.arguments(f'"{key}": ')
        yield from _literal(reader, 1)
        if (yield from _is_last(reader, ")")):
            break
        reader.arguments(", ")
        key = yield from _keyword(reader)
    reader.arguments("}")
    reader.end_call()


def _keyword(reader: Reader) -> Steps[str]:
    yield from reader.next_letter()
    key = yield from reader.word(_WORD)
    if not _KEY.fullmatch(key):
        raise Malformed
    yield from reader.expect("=")
    return key


def _is_last(reader: Reader, closing: str) -> Steps[bool]:
    """Takes what divides or ends a list. A last comma before the end is allowed, as in Python."""
    letter = yield from reader.next_letter()
    if letter == ",":
        reader.take()
        letter = yield from reader.next_letter()
        if letter != closing:
            return False
    if letter != closing:
        raise Malformed
    reader.take()
    return True


def _literal(reader: Reader, depth: int) -> Steps[None]:
    letter = yield from reader.next_letter()
    if depth > _MAX_DEPTH:
        raise Malformed
    if letter and letter in "\"'":
        yield from _string(reader, letter)
    elif letter == "[":
        yield from _sequence(reader, "]", depth)
    elif letter == "(":
        yield from _sequence(reader, ")", depth)
    elif letter == "{":
        yield from _mapping(reader, depth)
    else:
        word = yield from reader.word(_NUMBER, 512)
        word = word.replace("_", "") if word[:1].isdigit() else _WORDS.get(word, word)
        if word not in ("true", "false", "null") and not _JSON_NUMBER.fullmatch(word):
            raise Malformed
        reader.arguments(word)


def _sequence(reader: Reader, closing: str, depth: int) -> Steps[None]:
    reader.take()
    reader.arguments("[")
    if (yield from reader.next_letter()) == closing:
        reader.take()
    else:
        yield from _literal(reader, depth + 1)
        while not (yield from _is_last(reader, closing)):
            reader.arguments(", ")
            yield from _literal(reader, depth + 1)
    reader.arguments("]")


def _mapping(reader: Reader, depth: int) -> Steps[None]:
    reader.take()
    reader.arguments("{")
    if (yield from reader.next_letter()) == "}":
        reader.take()
    else:
        yield from _entry(reader, depth)
        while not (yield from _is_last(reader, "}")):
            reader.arguments(", ")
            yield from _entry(reader, depth)
    reader.arguments("}")


def _entry(reader: Reader, depth: int) -> Steps[None]:
    letter = yield from reader.next_letter()
    if not letter or letter not in "\"'":
        raise Malformed
    yield from _string(reader, letter)
    yield from reader.expect(":")
    reader.arguments(": ")
    yield from _literal(reader, depth + 1)


def _string(reader: Reader, quote: str) -> Steps[None]:
    reader.take()
    reader.arguments('"')
    while True:
        letter = yield from reader.peek()
        if letter == quote:
            reader.take()
            break
        if letter == "":
            raise Malformed
        text = (yield from _escape(reader)) if letter == "\\" else reader.take_run(_PLAIN[quote]) or reader.take()
        reader.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
    reader.arguments('"')


def _escape(reader: Reader) -> Steps[str]:
    reader.take()
    letter = yield from reader.peek()
    if letter in _ESCAPES:
        reader.take()
        return _ESCAPES[letter]
    if letter not in _NUM_DIGITS:
        # Python leaves an unknown escape as it stands
        return "\\"
    reader.take()
    digits = ""
    while len(digits) < _NUM_DIGITS[letter]:
        digit = yield from reader.peek()
        if not _HEX.fullmatch(digit):
            raise Malformed
        digits += reader.take()
    number = int(digits, 16)
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
        raise Malformed
    return chr(number)


FORMAT = ToolFormat(
    name="pythonic",
    read=_read,
    marks=(_OPEN, _CLOSE),
    is_taught_by=lambda template: "[func_name1(" in template or (_OPEN in template and TAUGHT not in template),
)
