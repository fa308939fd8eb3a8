"""What a user may ask of the form of an output. Names and meanings are vLLM's.

Only the size and the shape of a constraint are checked here, because that costs little; whether there is a grammar in
it is found out beside the hot path, before the request starts (`quire.structured_output`).
"""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import msgspec

from quire.errors import RequestError, one_line
from quire.parameter_checks import Suggesting, check_encodable, check_flags, list_of, plain

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
# What one constraint may cost before anything looks at its meaning.
MOST_CHARACTERS = 256 * 1024
MOST_DEPTH = 64
MOST_CHOICES = 4096
_PARAM = "structured_outputs"
_FLAGS = ("disable_any_whitespace", "disable_additional_properties")


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=Suggesting
):
    """The form of an output: exactly one of the first six.

    `json`: a JSON schema, as a dictionary or as text. `json_object=True`: any JSON object. `regex`: the whole output
    matches it. `choice`: the output is one of these texts. `grammar`: a context-free grammar, as Lark or GBNF.
    `structural_tag`: free text in which a trigger opens a tag whose content follows a schema, as in vLLM.
    """

    # always text after the checks; so it crosses a socket as it came, however deep it is
    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    # of JSON: no space between its parts; or what may stand there, as a regular expression
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    # of JSON: objects hold nothing but the properties that the schema names
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        for name in (*KINDS, "whitespace_pattern", *_FLAGS):
            value = getattr(self, name)
            # a schema is written as JSON as it is; it may be too deep to be walked through before its depth is known
            if not isinstance(value, dict):
                setattr(self, name, plain(value))
        check_flags(self, _FLAGS)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            said = "none was given" if not given else f"{' and '.join(given)} were given"
            raise _refused(f"exactly one of {', '.join(KINDS)} must be given; {said}")
        self._check_value(given[0])
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern)
            if self.disable_any_whitespace:
                raise _refused("whitespace_pattern: not together with disable_any_whitespace")

    @property
    def kind(self) -> str:
        """Which of the six it is."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def _check_value(self, kind: str) -> None:
        if kind == "json_object":
            if self.json_object is not True:
                raise _refused(f"json_object={self.json_object!r}: must be true; leave it out for free text")
        elif kind == "choice":
            self._check_choice()
        elif kind in ("json", "structural_tag"):
            setattr(self, kind, _as_json(kind, getattr(self, kind)))
        else:
            _check_text(kind, getattr(self, kind))

    def _check_choice(self) -> None:
        choices = list_of("choice", self.choice, is_text=True)
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise _refused("choice: must be a list of one or more texts that are not empty")
        if len(choices) > MOST_CHOICES:
            raise _refused(f"choice: {len(choices)} texts, at most {MOST_CHOICES} are allowed")
        _check_text("choice", "".join(choices))
        self.choice = choices


def _refused(what: str) -> RequestError:
    return RequestError(f"{_PARAM}: {what}.", param=_PARAM)


def _check_text(kind: str, text: Any) -> None:
    if not isinstance(text, str) or not text.strip():
        raise _refused(f"{kind}: must be a text that is not empty")
    if len(text) > MOST_CHARACTERS:
        raise _refused(f"{kind}: {len(text)} characters, at most {MOST_CHARACTERS} are allowed")
    check_encodable(_PARAM, text)


def _as_json(kind: str, value: Any) -> str:
    """The text of a schema, after a look at its size and depth."""
    if isinstance(value, str):
        _check_text(kind, value)
        try:
            parsed, text = json.loads(value), value
        except (ValueError, RecursionError) as error:
            raise _refused(f"{kind}: is no JSON ({one_line(error)})") from None
    else:
        parsed, text = value, ""
    if not isinstance(parsed, dict | bool):
        raise _refused(f"{kind}: must be an object, not {type(parsed).__name__}")
    # before it is written: the encoder recurses, and stops at a depth of its own
    if not _is_flat(parsed):
        raise _refused(f"{kind}: is nested more than {MOST_DEPTH} deep")
    if not text:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise _refused(f"{kind}: cannot be written as JSON ({one_line(error)})") from None
        _check_text(kind, text)
    return text


def _is_flat(value: Any) -> bool:
    """Whether it is nested no deeper than is allowed. Level by level, because who recurses falls into what is deep."""
    level = [value]
    for _ in range(MOST_DEPTH):
        insides = [
            inner.values() if isinstance(inner, dict) else inner
            for inner in level
            if isinstance(inner, dict | list | tuple)
        ]
        level = list(chain.from_iterable(insides))
        if not level:
            return True
    return False
