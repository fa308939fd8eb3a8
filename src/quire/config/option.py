"""An option is declared once: name, type, default, bounds, choices, help, section.

The Python keyword, the command-line flag, the row in the documentation and the check all derive from it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import PurePath
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from quire.errors import OptionError, suggestion

_SIZES = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9}
_SIZES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
# of tokens and other things; a large letter counts by 1,024, as in vLLM
_COUNTS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_COUNT = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)([kKmM])")
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}


def option(
    default: Any,
    help: str,  # noqa: A002 - the word that argparse uses for the same thing
    *,
    section: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    greatest: float | None = None,
    unit: str = "",
    flag: str = "",
    is_file_only: bool = False,
    parts: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that carries its own declaration. A list is a tuple of texts: its flag may be repeated, and
    `flag` is then its name for one of them. `is_file_only`: so rare that it has no flag; a file of options or a keyword
    sets it. `parts`: names under which somebody may look for what this option says."""
    metadata = {
        "help": help,
        "section": section,
        "choices": choices,
        "least": least,
        "greatest": greatest,
        "unit": unit,
        "flag": flag,
        "is_file_only": is_file_only,
        "parts": parts,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Option:
    """A declared option, as the command line and the documentation see it."""

    name: str
    kind: type
    is_optional: bool
    default: Any
    help: str
    section: str
    choices: tuple[str, ...]
    least: float | None
    greatest: float | None
    unit: str
    flag: str
    is_file_only: bool
    parts: tuple[str, ...]

    def parse(self, text: str) -> Any:
        """A value typed at a command line or in a file."""
        if self.is_optional and text.lower() in {"none", "auto"} and text not in self.choices:
            return None
        if self.kind is bool:
            return self._parse_bool(text)
        if self.unit == "bytes":
            return parse_bytes(text, self.name)
        if self.unit == "seconds" and self.kind is float:
            return parse_seconds(text, self.name, ", or auto" if self.is_optional else "")
        if self.kind is Mapping:
            return self._parse_object(text)
        if self.kind is tuple:
            return (text,)
        if self.kind is int and (counted := _COUNT.fullmatch(text)):
            return int(float(counted[1]) * _COUNTS[counted[2]])
        try:
            return self.kind(text)
        except ValueError:
            raise OptionError(f"{self.name}={text}: must be {self._kind_in_words()}.") from None

    def check(self, value: Any) -> Any:
        """The value itself, or an error that says what is allowed."""
        if self.kind is tuple and isinstance(value, list):
            value = tuple(value)
        if isinstance(value, str) and self.kind is not str:
            return self.check(self.parse(value))
        if isinstance(value, PurePath) and self.kind is str:
            value = str(value)
        if value is None:
            if self.is_optional:
                return None
            raise OptionError(f"{self.name}=None: must be {self._kind_in_words()}.")
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, self.kind) or (self.kind is int and isinstance(value, bool)):
            raise OptionError(f"{self.name}={value!r}: must be {self._kind_in_words()}.")
        if isinstance(value, tuple) and not all(isinstance(item, str) for item in value):
            raise OptionError(f"{self.name}={value!r}: must be {self._kind_in_words()}.")
        texts = value if isinstance(value, tuple) else (value,)
        empty = next((text for text in texts if isinstance(text, str) and not text.strip()), None)
        if empty is not None:
            raise OptionError(f"{self.name}={empty!r}: must not be empty. Leave it out for the default.")
        if self.choices and value not in self.choices:
            raise OptionError(
                f"{self.name}={value!r}: must be one of {', '.join(self.choices)}."
                + suggestion(str(value), self.choices)
            )
        self._check_bounds(value)
        return value

    @property
    def as_whole(self) -> str:
        """Of one of its parts, where it went."""
        return f"is said by {self.name}: {self.help}."

    def _check_bounds(self, value: Any) -> None:
        # "not within" rather than "outside": NaN is neither
        is_enough = self.least is None or value >= self.least
        if not is_enough or not (self.greatest is None or value <= self.greatest):
            raise OptionError(f"{self.name}={value}: must be {self._range_in_words()}.")

    def _parse_bool(self, text: str) -> bool:
        if text.lower() in {"1", "true", "yes", "on"}:
            return True
        if text.lower() in {"0", "false", "no", "off"}:
            return False
        raise OptionError(f"{self.name}={text}: must be true or false.")

    def _parse_object(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise OptionError(
                f'{self.name}={text[:200]}: must be a JSON object, such as {{"key": 1}}. '
                "In a shell, put it into single quotes."
            ) from None

    def _kind_in_words(self) -> str:
        words = {
            int: "a whole number",
            float: "a number",
            str: "a text",
            bool: "true or false",
            Mapping: "a JSON object (a dict)",
            tuple: "a list of texts",
        }
        return words[self.kind] + (f" of {self.unit}" if self.unit else "")

    def _range_in_words(self) -> str:
        if self.greatest is None:
            return f"at least {self.least}"
        if self.least is None:
            return f"at most {self.greatest}"
        return f"between {self.least} and {self.greatest}"


def options_of(declaration: type) -> dict[str, Option]:
    """Every option of a dataclass whose fields were made by `option`, by name."""
    hints = get_type_hints(declaration)
    found = {}
    for field in dataclasses.fields(declaration):
        hint = hints[field.name]
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = [kind for kind in parts if kind is not type(None)]
        found[field.name] = Option(
            name=field.name,
            kind=get_origin(kinds[0]) or kinds[0],
            is_optional=type(None) in parts,
            default=field.default,
            **{**field.metadata, "flag": field.metadata["flag"] or "--" + field.name.replace("_", "-")},
        )
    return found


def checked(declaration: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, each checked; an unknown name is an error with a suggestion."""
    options = options_of(declaration)
    wholes = {part: option for option in options.values() for part in option.parts}
    for name in values:
        if name in wholes:
            raise OptionError(f"{name}: {wholes[name].as_whole}")
        if name not in options:
            raise OptionError(f"{name}: there is no such option.{suggestion(name, options)}")
    return {name: options[name].check(value) for name, value in values.items()}


def parse_bytes(text: str, name: str = "size") -> int:
    """`2GiB`, `500M` or a plain number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = _SIZES.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise OptionError(f"{name}={text}: must be a size such as 500M, 2GiB or 1073741824.")
    return int(float(match.group(1)) * factor)


def num_bytes_of(value: Any, name: str) -> int:
    """A size inside an object: a whole number of bytes, or a text such as 1.5GiB. At least one byte."""
    num_bytes = parse_bytes(value, name) if isinstance(value, str) else value
    if type(num_bytes) is not int or num_bytes < 1:
        raise OptionError(f"{name}={value!r}: must be a size of at least one byte, such as 500M, 2GiB or 1073741824.")
    return num_bytes


def parse_seconds(text: str, name: str = "time", others: str = "") -> float:
    """`50ms`, `2s` or a plain number of seconds. `others`: what else is allowed, for the message."""
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?(?:[eE]-?\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = _TIMES.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise OptionError(f"{name}={text}: must be a time such as 50ms, 2s or 0.05{others}.")
    return float(match.group(1)) * factor
