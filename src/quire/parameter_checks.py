"""Checks that SamplingParams and BeamSearchParams share. Each raises RequestError, which names the field."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import msgspec

from quire.errors import RequestError, suggestion

# (field, least, greatest): both inclusive; whole numbers if `least` is one
Bounds = tuple[str, float, float]
_PLAIN = frozenset({bool, int, float, str, type(None)})
# what `plain` leaves as it is
_LEFT = _PLAIN | {list, tuple}
# of a list that is wrong
_MOST_SHOWN = 32


class Suggesting(msgspec.StructMeta):
    """A misspelt parameter is answered with the one that was meant, one that belongs elsewhere with its place."""

    # what to do instead, by the name of a parameter that people look for here
    _elsewhere: ClassVar[Mapping[str, str]] = {}

    def __call__(self, *args: Any, **values: Any) -> Any:
        self.check_names(values)
        return super().__call__(*args, **values)

    def check_names(self, names: Iterable[str]) -> None:
        known = self.__struct_fields__
        for name in names:
            if name not in known:
                hint = f" {self._elsewhere[name]}" if name in self._elsewhere else suggestion(name, known)
                raise RequestError(f"{name}: there is no such parameter.{hint}", param=name)


def make_plain(params: msgspec.Struct) -> None:
    """Every field as Python's own type, in lists and dictionaries too: nothing else crosses a socket."""
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if type(value) not in _LEFT:
            setattr(params, name, plain(value))


def plain(value: Any) -> Any:
    """Numbers, truth values and texts of other kinds, such as numpy's, as Python's own; anything else as it is."""
    if type(value) in _PLAIN:
        return value
    if hasattr(value, "tolist") and getattr(value, "ndim", None) == 0:
        value = value.tolist()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__int__(value)
    if isinstance(value, dict):
        return {plain(key): plain(entry) for key, entry in value.items()}
    return value


def check_flags(params: msgspec.Struct, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(params, name)
        if not isinstance(value, bool):
            raise RequestError(f"{name}={value!r}: must be True or False.", param=name)


def check_encodable(name: str, text: str) -> None:
    """Half of a surrogate pair is no Unicode and cannot be sent anywhere."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{name}={text!r}: holds a lone surrogate, which is no valid Unicode. Remove it.", param=name
        ) from None


def check_bounds(params: msgspec.Struct, bounds: Iterable[Bounds], *, optional: Collection[str] = ()) -> None:
    """Of fields that are plain. Those in `optional` may be None."""
    for name, least, greatest in bounds:
        value = getattr(params, name)
        is_integer = type(least) is int
        # each request comes by here twice: no calls for what is right; infinity and NaN lie between no bounds
        if type(value) is int or (type(value) is float and not is_integer):
            is_right = least <= value <= greatest
        else:
            is_right = value is None and name in optional
        if not is_right:
            kind = "a whole number" if is_integer else "a number"
            raise RequestError(f"{name}={value!r}: must be {kind} between {least} and {greatest}.", param=name)


def check_token_ids(name: str, token_ids: Iterable[object]) -> None:
    ids: Any = list(token_ids)
    # types are compared all at once: there may be as many ids as the vocabulary has
    if {*map(type, ids)} - {int} or (ids and min(ids) < 0):
        shown = f"{ids!r}" if len(ids) <= _MOST_SHOWN else f"{ids[:_MOST_SHOWN]!r} and more"
        raise RequestError(f"{name}={shown}: must be a list of token ids, 0 or greater.", param=name)


def list_of(name: str, value: Any, *, is_text: bool = False) -> list[Any]:
    """A list of its own; one text stands for a list of one."""
    if value is None or (type(value) is list and not value):
        return []
    value = plain(value)
    if is_text and isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple | set | frozenset) and not hasattr(value, "tolist"):
        kind = "a text or a list of texts" if is_text else "a list of token ids"
        raise RequestError(f"{name}={value!r}: must be {kind}.", param=name)
    entries = value.tolist() if hasattr(value, "tolist") else value
    return list(entries) if {*map(type, entries)} <= _PLAIN else [plain(entry) for entry in entries]


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))
