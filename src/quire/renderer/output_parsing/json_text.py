"""JSON while it arrives: checked letter by letter, handed on as it was written, and the calls that are written in it.

Two things that models write and JSON forbids are put right: control characters in strings, and an escaped apostrophe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from quire.renderer.output_parsing.answer import Malformed
from quire.renderer.output_parsing.reader import MAX_HELD, Reader, Steps

Write = Callable[[str], None]

_MAX_DEPTH = 64
_MAX_NUMBER = 512
_CLOSING = {"{": "}", "[": "]"}
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_HEX = re.compile(r"[0-9a-fA-F]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPES = '"\\/bfnrt'
# what models call a function's name and its arguments in the objects that they write
_NAME = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


def read_json(reader: Reader, write: Write) -> Steps[None]:
    """One value; nothing behind it is read."""
    closing: list[str] = []
    is_opened = False
    while True:
        letter = yield from _next_letter(reader, write)
        if is_opened and letter == closing[-1]:
            write(reader.take())
            closing.pop()
        else:
            if closing and closing[-1] == "}":
                letter = yield from _read_key(reader, write, letter)
            if letter in _CLOSING:
                write(reader.take())
                closing.append(_CLOSING[letter])
                is_opened = True
                if len(closing) > _MAX_DEPTH:
                    raise Malformed
                continue
            yield from _read_scalar(reader, write, letter)
        is_opened = False
        while closing:
            letter = yield from _next_letter(reader, write)
            if letter == ",":
                write(reader.take())
                break
            if letter != closing[-1]:
                raise Malformed
            write(reader.take())
            closing.pop()
        else:
            return


def _next_letter(reader: Reader, write: Write) -> Steps[str]:
    while True:
        letter = yield from reader.peek()
        if letter not in (" ", "\n", "\r", "\t"):
            return letter
        write(reader.take())


def _read_key(reader: Reader, write: Write, letter: str) -> Steps[str]:
    """A key and its colon; the first letter of its value."""
    if letter != '"':
        raise Malformed
    yield from _read_string(reader, write)
    if (yield from _next_letter(reader, write)) != ":":
        raise Malformed
    write(reader.take())
    return (yield from _next_letter(reader, write))


def _read_scalar(reader: Reader, write: Write, letter: str) -> Steps[None]:
    if letter == '"':
        yield from _read_string(reader, write)
        return
    word = yield from reader.word(_WORD, _MAX_NUMBER)
    if not _SCALAR.fullmatch(word):
        raise Malformed
    write(word)


def _read_string(reader: Reader, write: Write) -> Steps[None]:
    write(reader.take())
    while True:
        letter = yield from reader.peek()
        if letter == '"':
            write(reader.take())
            return
        if letter == "\\":
            yield from _read_escape(reader, write)
        elif letter == "":
            raise Malformed
        elif letter < " ":
            write(f"\\u{ord(reader.take()):04x}")
        else:
            write(reader.take_run(_PLAIN))


def _read_escape(reader: Reader, write: Write) -> Steps[None]:
    """Handed on whole, so that no part of an answer ends inside."""
    reader.take()
    letter = yield from reader.peek()
    if letter == "u":
        reader.take()
        digits = ""
        while len(digits) < 4:
            digit = yield from reader.peek()
            if not _HEX.fullmatch(digit):
                raise Malformed
            digits += reader.take()
        write("\\u" + digits)
    elif letter == "'":
        write(reader.take())
    elif letter and letter in _ESCAPES:
        write("\\" + reader.take())
    else:
        raise Malformed


# ---------------------------------------------------------------------------------------------- calls


def read_arguments(reader: Reader, name: str, call_id: str | None = None) -> Steps[None]:
    """The object that follows is what this function is called with."""
    if (yield from reader.next_letter()) != "{":
        raise Malformed
    reader.start_call(name, call_id)
    yield from read_json(reader, reader.arguments)
    reader.end_call()


def read_call(reader: Reader, names: Collection[str] | None = None) -> Steps[None]:
    """{"name": ..., "arguments": {...}} in either order; `names`: only these are calls."""
    name = ""
    held = ""
    is_begun = False
    yield from reader.expect("{")
    while True:
        yield from reader.next_letter()
        key = yield from read_text(reader)
        yield from reader.expect(":")
        letter = yield from reader.next_letter()
        if is_begun or key not in (*_NAME, *_ARGUMENTS):
            yield from read_json(reader, _drop)
        elif key in _NAME:
            name = yield from read_text(reader)
            if names is not None and name not in names:
                raise Malformed
        elif name and letter == "{":
            yield from read_arguments(reader, name)
            is_begun = True
        else:
            held = yield from _collected(reader)
        letter = yield from reader.next_letter()
        if letter not in (",", "}"):
            raise Malformed
        reader.take()
        if letter == "}":
            break
    if not is_begun:
        if not name:
            raise Malformed
        reader.call(name, _object_in(held))


def read_calls(reader: Reader, names: Collection[str] | None = None) -> Steps[None]:
    """A list of such objects, at least one."""
    yield from reader.expect("[")
    while True:
        yield from read_call(reader, names)
        reader.accept()
        letter = yield from reader.next_letter()
        if letter not in (",", "]"):
            raise Malformed
        reader.take()
        if letter == "]":
            return


def read_text(reader: Reader) -> Steps[str]:
    """A string, decoded."""
    if (yield from reader.peek()) != '"':
        raise Malformed
    parts: list[str] = []
    yield from _read_string(reader, parts.append)
    text = decoded("".join(parts))
    assert isinstance(text, str)
    return text


def _collected(reader: Reader) -> Steps[str]:
    """A value whose meaning is not known yet. An attempt bounds what it may hold."""
    parts: list[str] = []
    yield from read_json(reader, parts.append)
    return "".join(parts)


def _object_in(text: str) -> str:
    """Arguments that were collected: an object, one written as a string, or none at all."""
    value = decoded(text) if text else None
    if isinstance(value, str):
        text = value
        value = decoded(value)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed
    return text


def decoded(text: str) -> Any:
    """Any JSON value; Malformed if it is none."""
    if len(text) > MAX_HELD:
        raise Malformed
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError):
        raise Malformed from None


def _drop(text: str) -> None:
    """For a value that nobody asked for."""
