"""What somebody wrote for vLLM, in our words: keywords of an engine, or a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from quire.config.engine_options import EngineOptions
from quire.config.option import Option, options_of
from quire.errors import OptionError
from quire.interfaces.compat.vllm_options import NEUTRAL_KEYS, OPTIONS, VALUES, VllmOption
from quire.interfaces.server.options import ServerOptions

# what they say stands in no message
_SECRET = ("hf_token",)
# -O3, glued
_LEVEL = re.compile(r"-O\d+")
_LIMITS = re.compile(r"\w+=\d+(,\w+=\d+)*")


@dataclass
class Unused:
    """Options that change nothing here, to be said once and in one line."""

    options: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """Empty if there are none."""
        names_by_note: dict[str, list[str]] = {}
        for name, note in self.options.items():
            names_by_note.setdefault(note, []).append(name)
        said = "; ".join(f"{', '.join(names)} ({note})" for note, names in names_by_note.items())
        return f"options of vLLM that change nothing here: {said}." if said else ""

    def check(self, option: VllmOption, value: str, key: str = "") -> None:
        """Takes one more, or says why it cannot be had. `key`: the value is that of one key of an object."""
        for name, asked in _keys_of(value, key).items():
            if name in option.refused_keys and str(asked).lower() not in ("false", "none", ""):
                note = option.refused_keys[name]
                raise OptionError(f"{option.name}.{name}: an option of vLLM that cannot be had here: {note}.")
        if option.accepted is not None and value.lower() not in option.accepted:
            is_switch = value in ("true", "false") and option.takes == 0
            shown = "" if is_switch or option.name in _SECRET else f"={value[:80]}"
            raise OptionError(f"{option.name}{shown}: an option of vLLM that cannot be had here: {option.note}.")
        if not option.is_refused:
            self.options[option.name] = option.note


def options_from_vllm(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], Unused]:
    """Keywords of vLLM's LLM or EngineArgs as those of our LLM. None stands for what nobody has set."""
    ours: dict[str, Any] = {}
    unused = Unused()
    known = _rows()
    for name, value in keywords.items():
        row = known.get(name)
        if value is None:
            continue
        if row is not None and not row.ours:
            unused.check(row, _as_text(value))
        else:
            _give(ours, name, row, value)
    return ours, unused


def _give(ours: dict[str, Any], name: str, row: VllmOption | None, value: Any) -> None:
    if row is None:
        ours[name] = _value_of(name, value)
    elif row.key:
        ours[row.ours] = {**ours.get(row.ours, {}), row.key: value}
    elif not row.sets:
        is_text = _own_options()[row.ours].kind is str
        ours[row.ours] = json.dumps(value) if is_text and isinstance(value, Mapping) else _value_of(row.ours, value)
    elif value:
        ours[row.ours] = row.sets


def arguments_from_vllm(args: Sequence[str]) -> tuple[list[str], Unused]:
    """A command line of vLLM as ours. What has no row is left for our own parser to judge."""
    return _CommandLine(args).translated()


class _CommandLine:
    def __init__(self, args: Sequence[str]) -> None:
        self._rest = list(args)
        self._ours: list[str] = []
        self._unused = Unused()
        # options that are objects, given a key at a time: --speculative-config.method ngram
        self._objects: dict[str, dict[str, Any]] = {}

    def translated(self) -> tuple[list[str], Unused]:
        while self._rest and self._rest[0] != "--":
            self._take(self._rest.pop(0))
        objects = [f"{flag}={json.dumps(keys)}" for flag, keys in self._objects.items()]
        return [*self._ours, *objects, *self._rest], self._unused

    def _take(self, arg: str) -> None:
        flag, equals, value = arg.partition("=")
        head, _, path = flag.partition(".")
        row = _rows_by_flag().get(flag if flag in _rows_by_flag() else head)
        if _LEVEL.fullmatch(arg):
            self._take_row(_rows_by_flag()["-O"], "-O", [arg[2:]], "")
        elif row is not None:
            self._take_row(row, flag, [value] if equals else None, path)
        elif path and head in _object_flags():
            _set(self._objects.setdefault(head, {}), path.split("."), value if equals else self._next(flag))
        elif flag in _flags_with_values() and (equals or self._rest):
            value = value if equals else self._rest.pop(0)
            self._ours += [flag, _value_of(_flags_with_values()[flag], value)]
        else:
            self._ours.append(arg)

    def _take_row(self, row: VllmOption, flag: str, given: list[str] | None, key: str) -> None:
        is_on = not flag.startswith("--no-")
        values = given if given is not None else self._values(row, flag)
        if not row.ours:
            self._unused.check(row, (values or ["true" if is_on else "false"])[0], key)
            return
        option = _own_options()[row.ours]
        if row.key:
            _set(self._objects.setdefault(option.flag, {}), [row.key], values[0])
            return
        if row.sets:
            self._ours += [f"{option.flag}={row.sets}"] if is_on else []
        elif row.takes == 0:
            self._ours.append(option.flag if is_on else option.flag.replace("--", "--no-", 1))
        for value in values:
            self._ours += [f"{option.flag}={one}" for one in _several(option, _value_of(row.ours, value))]

    def _values(self, row: VllmOption, flag: str) -> list[str]:
        if row.takes == 0:
            return []
        if row.takes == 1:
            return [self._next(flag)]
        values = []
        while self._rest and not self._rest[0].startswith("-"):
            values.append(self._rest.pop(0))
        return values

    def _next(self, flag: str) -> str:
        if not self._rest:
            raise OptionError(f"{flag}: expects a value.")
        return self._rest.pop(0)


def _set(keys: dict[str, Any], path: list[str], text: str) -> None:
    for key in path[:-1]:
        keys = keys.setdefault(key, {})
    try:
        keys[path[-1]] = json.loads(text)
    except ValueError:
        keys[path[-1]] = text


def _keys_of(value: Any, key: str) -> Mapping[str, Any]:
    if key:
        return {key.replace("-", "_"): value}
    if isinstance(value, Mapping):
        return value
    try:
        keys = json.loads(value)
    except ValueError:
        return {}
    return keys if isinstance(keys, dict) else {}


def _several(option: Option, value: Any) -> Iterable[Any]:
    """Of a list that was typed as JSON, each entry."""
    if option.kind is tuple and isinstance(value, str) and value.startswith("["):
        try:
            return [str(entry) for entry in json.loads(value)]
        except ValueError:
            pass
    return [value]


def _value_of(name: str, value: Any) -> Any:
    if name == "limit_mm_per_prompt" and isinstance(value, str) and _LIMITS.fullmatch(value):
        # as it was typed before it was an object: image=4,video=0
        return json.dumps({kind: int(count) for kind, _, count in (one.partition("=") for one in value.split(","))})
    if name in NEUTRAL_KEYS and (keys := _keys_of(value, "")):
        kept = {key: one for key, one in keys.items() if not _is_neutral(NEUTRAL_KEYS[name], key, one)}
        return json.dumps(kept) if isinstance(value, str) else kept
    names = VALUES.get(name)
    return names.get(str(value), value) if names is not None and isinstance(value, str | int) else value


def _is_neutral(neutral: Mapping[str, tuple[object, ...] | None], key: str, value: Any) -> bool:
    if key not in neutral:
        return False
    values = neutral[key]
    return values is None or value in values


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else json.dumps(value, default=str)


@cache
def _rows() -> dict[str, VllmOption]:
    return {row.name: row for row in OPTIONS if row.ours != row.name}


@cache
def _rows_by_flag() -> dict[str, VllmOption]:
    found: dict[str, VllmOption] = {}
    for row in OPTIONS:
        spellings = [*row.short, row.flag]
        if row.takes == 0:
            spellings.append(row.flag.replace("--", "--no-", 1))
        found |= dict.fromkeys(spellings, row)
    return found


@cache
def _own_options() -> dict[str, Option]:
    return options_of(EngineOptions) | options_of(ServerOptions)


@cache
def _object_flags() -> frozenset[str]:
    return frozenset(option.flag for option in _own_options().values() if option.kind is Mapping)


@cache
def _flags_with_values() -> dict[str, str]:
    return {_own_options()[name].flag: name for name in (*VALUES, *NEUTRAL_KEYS, "limit_mm_per_prompt")}
