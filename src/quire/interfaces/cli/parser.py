"""argparse with Quire's manners: an unknown flag is answered with the one that was meant, errors are exceptions.

Flags may be typed with dashes or underscores (--max-model-len, --max_model_len).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from quire.errors import OptionError, suggestion
from quire.interfaces.cli.config_file import FLAG, ElsewhereAction, as_arguments, file_named_in, read_entries

if TYPE_CHECKING:
    from quire.interfaces.compat.vllm_names import Unused


_NOT_IN_FILES = ("help", "config")


class CommandParser(argparse.ArgumentParser):
    """Parser of one command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **settings)
        # other engines' flags, in our words
        self.translate: Callable[[Sequence[str]], tuple[list[str], Unused]] | None = None
        # what is to be said of them
        self.remark = ""

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        typed = _with_dashes(args)
        file = file_named_in(typed) if FLAG in self._option_string_actions else None
        typed = self._translated(typed)
        entries, values = ([], {}) if file is None else self._entries_of(file, typed)
        found, unknown = self.parse_known_args([*entries, *typed], argparse.Namespace(**values))
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                raise OptionError(f"{self.prog}: one argument too many: {unknown[0]!r}.")
            known = [flag for action in self._actions for flag in action.option_strings]
            hint = suggestion(name, known) or f" {self.prog} --help lists all."
            raise OptionError(f"{name}: {self.prog} has no such option.{hint}")
        return found

    def _translated(self, typed: list[str]) -> list[str]:
        if self.translate is None:
            return typed
        ours, unused = self.translate(typed)
        self.remark = " ".join(filter(None, (self.remark, unused.line())))
        return ours

    def _entries_of(self, file: str, typed: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Of a file, but for those that were typed: as they would be typed, and the values of what has no flag."""
        actions = {flag: action for action in self._actions for flag in action.option_strings}
        flags = {action.dest.replace("_", "-"): action.option_strings[0] for action in actions.values()}
        chosen = {actions[flag].dest for flag in map(_flag_of, typed) if flag in actions}
        if any(action.dest == "model_argument" for action in self._actions):
            has_model = self.parse_known_args(typed)[0].model_argument is not None
            chosen |= {"model"} if has_model else set()
        kept: list[str] = []
        values: dict[str, Any] = {}
        for name, value in read_entries(file).items():
            flag = f"--{name}" if f"--{name}" in actions else flags.get(name, f"--{name}")
            action = actions.get(flag)
            if isinstance(action, ElsewhereAction) and action.is_entry:
                values |= {} if value is None else {action.dest: value}
                continue
            if isinstance(value, list) and any(isinstance(entry, list) for entry in value):
                raise OptionError(f"config={file}: {name}: a list in a list is no value of an option. Write one list.")
            takes_one = type(action) is argparse._StoreAction and not action.nargs
            if takes_one and isinstance(value, list) and len(value) > 1:
                raise OptionError(f"config={file}: {name}: this takes one value, not a list of {len(value)}.")
            is_switch = flag not in actions or isinstance(actions[flag], argparse.BooleanOptionalAction)
            arguments = self._translated(as_arguments(flag, value, is_switch=is_switch))
            meant = [actions.get(_flag_of(argument)) for argument in arguments if argument.startswith("--")]
            is_known = bool(arguments) or flag in actions or self._is_of_others(flag)
            if None in meant or name in _NOT_IN_FILES or not is_known:
                known = [one for one in flags if one not in _NOT_IN_FILES]
                raise OptionError(f"config={file}: {name}: {self.prog} has no such option.{suggestion(name, known)}")
            if not chosen & {action.dest for action in meant if action is not None}:
                kept += arguments
        return kept, values

    def _is_of_others(self, flag: str) -> bool:
        """Whether another engine has this one, which is none of ours."""
        empty = [f"{flag}="]
        try:
            return self._translated(empty) != empty
        except OptionError:
            # it cannot be had, or not so
            return True

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message[0].upper()}{message[1:]}. See {self.prog} --help.")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def _flag_of(argument: str) -> str:
    return argument.partition("=")[0]


def _with_dashes(args: Sequence[str]) -> list[str]:
    """Underscores in the names of flags become dashes; values and what follows `--` stay as they are."""
    changed: list[str] = []
    for number, arg in enumerate(args):
        if arg == "--":
            return [*changed, *args[number:]]
        # up to a value, and up to a key of an object: --speculative-config.num_speculative_tokens=3
        name = re.split(r"[=.]", arg, maxsplit=1)[0]
        changed.append(name.replace("_", "-") + arg[len(name) :] if name.startswith("--") else arg)
    return changed
