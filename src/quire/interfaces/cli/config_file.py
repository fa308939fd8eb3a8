"""`--config quire.yaml`: a command's flags, written in a file by their names. What is typed as well wins."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import OptionError

FLAG = "--config"
# a file that holds one of them is its owner's alone
_SECRETS = frozenset({"api-keys", "api-key", "admin-api-key", "tenant-secret"})

_MERGE = "<<"
# of an option, or of a part of one
_NAME = re.compile(r"[\w.-]+")
_MOST_CHARACTERS = 2**20
_MOST_DEPTH = 100


class ElsewhereAction(argparse.Action):
    """A flag that nobody lists: who types it is told where that is said instead."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str | None = None, where: str = "") -> None:
        super().__init__(option_strings, dest, "?", const, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._where = where

    def __call__(self, _parser: Any, _namespace: Any, value: Any, flag: str | None = None) -> None:
        raise OptionError(f"{flag}: {self._where or self._line_of_file(value, str(flag))}")

    def _line_of_file(self, value: Any, flag: str) -> str:
        if self.const is not None:
            # a switch
            value = "false" if flag.startswith("--no-") else "true"
        line = f"{self.dest}: {value or 'value'}"
        return f"is no flag, and stands in a file alone. Write {line} into a YAML file, and give that as {FLAG} FILE."

    @property
    def is_entry(self) -> bool:
        """Whether a file of options may set it."""
        return not self._where


def add_config(parser: argparse.ArgumentParser) -> None:
    text = "options in a YAML file, also those that have no flag (docs/options.md); what is typed wins"
    parser.add_argument(FLAG, metavar="FILE", help=text)


def file_named_in(args: Sequence[str]) -> str | None:
    """The last one. Raises OptionError where the name is missing."""
    found = None
    for number, arg in enumerate(args):
        if arg == "--":
            break
        if arg == FLAG:
            if number + 1 == len(args):
                raise OptionError(f"{FLAG}: expects the name of a file.")
            found = args[number + 1]
        elif arg.startswith(f"{FLAG}="):
            found = arg.removeprefix(f"{FLAG}=")
    return found


def read_entries(file: str) -> dict[str, Any]:
    """By name with dashes. Raises OptionError for what is no file of options."""
    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read(_MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8"
        raise OptionError(f"config={file}: cannot be read ({reason}). Name a YAML file that you may read.") from None
    if len(text) > _MOST_CHARACTERS:
        raise OptionError(f"config={file}: has more than {_MOST_CHARACTERS:,} characters, so it is no file of options.")
    entries = _parsed(text, file)
    if _SECRETS & entries.keys():
        from quire.interfaces.gateway.access.api_keys import check_is_private

        check_is_private(Path(file), "config")
    return entries


def _parsed(text: str, file: str) -> dict[str, Any]:
    import yaml

    try:
        # before anything is made of it: a few lines of them may stand for gigabytes, or for themselves
        has_references = _has_references(yaml.parse(text, Loader=yaml.SafeLoader))
        pairs: Any = None if has_references else yaml.compose(text, Loader=yaml.SafeLoader)
        content = None if has_references else yaml.safe_load(text)
    # the last one: of a date or a number that is none, and of what is nested too deep
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise OptionError(f"config={file}: is no valid YAML: {problem}.") from None
    if has_references:
        problem = f"has aliases (*name) or merges ({_MERGE})"
        raise OptionError(f"config={file}: {problem}. Write each value where it belongs.")
    if content is None:
        return {}
    # a name that can be none is not shown: it may be a line of any file, one with passwords among them
    if not isinstance(content, dict) or not all(_NAME.fullmatch(str(key)) for key in content):
        raise OptionError(f"config={file}: must hold names and values, such as max-model-len: 4096.")
    names = [str(key.value).replace("_", "-") for key, _ in pairs.value]
    double = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if double is not None:
        raise OptionError(f"config={file}: {double} stands there twice. Keep one of them.")
    return dict(zip(names, content.values(), strict=True))


def _has_references(events: Iterable[Any]) -> bool:
    """Aliases or merges. Raises ValueError where it is nested too deep, before the rest is read."""
    import yaml

    depth = 0
    for event in events:
        is_merge = isinstance(event, yaml.ScalarEvent) and event.value == _MERGE and event.implicit[0]
        if isinstance(event, yaml.AliasEvent) or is_merge:
            return True
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MOST_DEPTH:
            raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")
    return False


def as_arguments(flag: str, value: Any, *, is_switch: bool) -> list[str]:
    """One entry, as it would be typed."""
    match value:
        case None:
            return []
        case bool() if is_switch:
            return [flag if value else flag.replace("--", "--no-", 1)]
        case bool():
            return [f"{flag}={str(value).lower()}"]
        case list():
            return [word for entry in value for word in as_arguments(flag, entry, is_switch=False)]
        case Mapping():
            return [f"{flag}={json.dumps(value, default=str)}"]
        case _:
            return [f"{flag}={value}"]
