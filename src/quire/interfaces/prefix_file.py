"""The file behind the option `pinned_prefixes`: a JSON list of prefixes that are pinned when the engine starts.

    [{"name": "support", "messages": [{"role": "system", "content": "You answer questions about ..."}]},
     {"name": "few-shot", "text": "English: cheese\\nFrench: fromage\\n", "cache_salt": "tenant-7"}]

Read before the model loads, so that a mistake shows at once. Strict: what it does not know is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import msgspec

from quire.errors import OptionError, RequestError, one_line, suggestion
from quire.interfaces.handles import checked_name

FORMS = ("text", "messages", "token_ids")


class PrefixSpec(msgspec.Struct, kw_only=True):
    """One entry: a name, and exactly one of three forms of the prefix."""

    name: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    cache_salt: str = ""

    @property
    def prompt(self) -> Any:
        """In a form that `pin_prefix` takes."""
        return prompt_of(self.text, self.messages, self.token_ids)


def prompt_of(text: str | None, messages: list[dict[str, Any]] | None, token_ids: list[int] | None) -> Any:
    """The one that is given; RequestError if it is none of the three, or more."""
    given = [value for value in (text, messages, token_ids) if value is not None]
    if len(given) != 1:
        raise RequestError(
            f"{' or '.join(FORMS)}: {len(given)} of them are given, exactly one is needed.", param="text"
        )
    if messages == []:
        raise RequestError("messages: there are none. Give at least one.", param="messages")
    return given[0]


def read_prefix_file(path: str) -> list[PrefixSpec]:
    """All entries, or an OptionError that names entry and field."""
    try:
        entries = msgspec.json.decode(Path(path).read_bytes())
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _refuse(path, f"is not valid JSON: {one_line(error)}")
    if not isinstance(entries, list):
        _refuse(path, 'must hold a JSON list of prefixes, such as [{"name": "greeting", "text": "Hello"}]')
    specs: list[PrefixSpec] = []
    for position, entry in enumerate(entries):
        spec = _spec(path, position, entry)
        if spec.name in [earlier.name for earlier in specs]:
            _refuse(path, f"entry {position}: name={spec.name!r} is the name of an earlier entry. Choose another")
        specs.append(spec)
    return specs


def _spec(path: str, position: int, entry: object) -> PrefixSpec:
    known = PrefixSpec.__struct_fields__
    where = f"entry {position}"
    if not isinstance(entry, dict):
        _refuse(path, f'{where}: must be an object such as {{"name": "greeting", "text": "Hello"}}')
    for key in entry:
        if key not in known:
            _refuse(path, f"{where}: {key!r} is not one of {', '.join(known)}.{suggestion(key, known)}")
    try:
        spec = msgspec.convert(entry, PrefixSpec)
        checked_name(spec.name, "pinned prefix")
        prompt_of(spec.text, spec.messages, spec.token_ids)
    except msgspec.ValidationError as error:
        _refuse(path, f"{where}: {str(error).replace(' - at `$.', ' in `')}")
    except RequestError as error:
        _refuse(path, f"{where}: {error}")
    return spec


def _refuse(path: str, why: str) -> NoReturn:
    end = "" if why.endswith((".", "?")) else "."
    raise OptionError(f"pinned_prefixes={path}: {why}{end} docs/kv-cache.md shows the form of the file.") from None
