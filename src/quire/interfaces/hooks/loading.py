"""From what a user names to hooks: an entry point of the group quire.hooks, or module:object. Behind another colon
stands what it is made with.

    --hook no_secrets    --hook my_hooks:NoSecrets    --hook 'my_hooks:NoSecrets:{"words": ["secret"]}'
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from quire.config import EngineConfig
from quire.errors import OptionError, suggestion
from quire.hooks import Hook, has
from quire.interfaces.hooks.hook_process import HookProcess
from quire.interfaces.hooks.judging import CLOSED, OPEN, Hooks, NamedHook

GROUP = "quire.hooks"
_BUILT_IN = {"banned_text": "quire.interfaces.hooks.banned_text:BannedText"}


def hooks_of(config: EngineConfig, given: Sequence[str | Hook] | None = None) -> Hooks:
    """Those of an engine. `given`: objects and names, in the place of the configuration's names."""
    named = config.hooks if given is None else given
    found = load_hooks(named, config.hook_timeout, config.hook_on_failure, in_processes=config.hook_process)
    return Hooks(found)


def names_among(hooks: Sequence[str | Hook]) -> tuple[str, ...]:
    """For the configuration, which only knows names."""
    return tuple(one for one in hooks if isinstance(one, str))


def load_hooks(
    named: Sequence[str | Hook], timeout: float, on_failure: str, *, in_processes: bool = False
) -> list[NamedHook]:
    """In their order. `in_processes`: those that have names."""
    found = []
    for one in named:
        name, hook = made_hook(one) if isinstance(one, str) else (type(one).__name__, one)
        if not isinstance(hook, Hook):
            raise OptionError(f"hooks={one!r}: must be a quire.hooks.Hook, or name one.")
        if in_processes and isinstance(one, str):
            if has(hook, "open"):
                raise OptionError(
                    f"hook {name}: asks the engine, which it cannot do from a process. Leave out hook_process."
                )
            hook = HookProcess(one, hook, timeout)
        own = hook.on_failure or on_failure
        if own not in (OPEN, CLOSED):
            raise OptionError(f"hook {name}: on_failure={own!r} must be {OPEN} or {CLOSED}.")
        found.append(NamedHook(name, hook, hook.timeout or timeout, own == OPEN))
    return found


def made_hook(text: str) -> tuple[str, Any]:
    """The name of a hook, and the hook; somebody else's code may raise anything."""
    try:
        name, made, args = _found(text)
        if args is not None or isinstance(made, type):
            made = made(*_arguments(args)[0], **_arguments(args)[1])
        return name, made
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(f"hook={text}: {type(error).__name__}: {error}. Mend it, or leave it out.") from error


def _found(text: str) -> tuple[str, Any, str | None]:
    """(name, object, arguments)."""
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    first, _, rest = text.partition(":")
    if first in _BUILT_IN:
        return first, _object(*_BUILT_IN[first].split(":")), rest or None
    if first in installed:
        return first, installed[first].load(), rest or None
    if not rest:
        known = sorted({*_BUILT_IN, *installed})
        raise OptionError(
            f"hook={text}: must be {', '.join(known)}, or module:object. Packages bring further ones as entry points "
            f"of the group {GROUP}.{suggestion(text, known)}"
        )
    path, _, args = rest.partition(":")
    return f"{first}:{path}", _object(first, path), args or None


def _object(module: str, path: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _arguments(text: str | None) -> tuple[list[Any], dict[str, Any]]:
    """A JSON object is keywords; whatever else is one text."""
    if text is None:
        return [], {}
    if text.lstrip().startswith("{"):
        return [], json.loads(text)
    return [text], {}
