"""`quire completion bash|zsh|fish`: a script for the shell, made from the flags that the commands declare."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.interfaces.cli.parser import CommandParser

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Flag:
    """One spelling of an option."""

    name: str
    help: str
    takes_value: bool
    choices: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='as in: eval "$(quire completion bash)"')


def run(arguments: argparse.Namespace) -> int:
    print(script(arguments.shell), end="")
    return 0


def script(shell: str) -> str:
    # its table names this module, too
    from quire.interfaces.cli.program import COMMANDS

    helps = {name: text for name, (_, text) in COMMANDS.items()}
    flags = {name: list(_flags_of(importlib.import_module(module))) for name, (module, _) in COMMANDS.items()}
    lines = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](helps, flags)
    return "\n".join([f"# Completion of quire for {shell}, made by: quire completion {shell}", *lines, ""])


def _flags_of(command: Any) -> Iterator[Flag]:
    parser = CommandParser(prog="quire")
    command.add_arguments(parser)
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        takes_value = action.nargs != 0
        choices = tuple(str(choice) for choice in action.choices or ())
        text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%").partition(";")[0]
        for name in action.option_strings:
            yield Flag(name, text, takes_value, choices)


def _bash(helps: dict[str, str], flags: dict[str, list[Flag]]) -> Iterator[str]:
    yield "_quire() {"
    yield '    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} flags="" values=""'
    # a flag and its value may be joined
    yield '    if [[ $current == "=" ]]; then current=""; fi'
    yield '    if [[ $before == "=" ]]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi'
    yield "    if [[ $COMP_CWORD -eq 1 ]]; then"
    yield f'        COMPREPLY=($(compgen -W "{" ".join(helps)} --help --version" -- "$current")); return'
    yield "    fi"
    yield '    case "${COMP_WORDS[1]} $before" in'
    for command, known in flags.items():
        for flag in known:
            if flag.choices:
                yield f'        "{command} {flag.name}") values="{" ".join(flag.choices)}" ;;'
    yield "    esac"
    yield '    if [[ -n $values ]]; then COMPREPLY=($(compgen -W "$values" -- "$current")); return; fi'
    yield '    case "${COMP_WORDS[1]}" in'
    for command, known in flags.items():
        yield f'        {command}) flags="{" ".join(flag.name for flag in known)}" ;;'
    yield "    esac"
    yield '    if [[ $current == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$current"))'
    yield '    else COMPREPLY=($(compgen -f -- "$current")); fi'
    yield "}"
    yield "complete -o filenames -F _quire quire"


def _zsh(helps: dict[str, str], flags: dict[str, list[Flag]]) -> Iterator[str]:
    yield "#compdef quire"
    yield "_quire() {"
    yield "    if (( CURRENT == 2 )); then"
    commands = " ".join(shlex.quote(f"{name}:{text}") for name, text in helps.items())
    yield f"        local -a commands=({commands}); _describe command commands; return"
    yield "    fi"
    yield "    case $words[2] in"
    for command, known in flags.items():
        specs = " ".join(shlex.quote(_zsh_spec(flag)) for flag in known)
        yield f"        {command}) shift words; (( CURRENT-- )); _arguments {specs} '*:file:_files' ;;"
    yield "    esac"
    yield "}"
    # by the file's name in fpath, or by eval
    yield 'if [[ $funcstack[1] == _quire ]]; then _quire "$@"; else compdef _quire quire; fi'


def _zsh_spec(flag: Flag) -> str:
    text = flag.help
    for mark in "\\[]:":
        text = text.replace(mark, f"\\{mark}")
    values = f"({' '.join(flag.choices)})" if flag.choices else "_files"
    # a flag may come again
    return f"*{flag.name}[{text}]" + (f":value:{values}" if flag.takes_value else "")


def _fish(helps: dict[str, str], flags: dict[str, list[Flag]]) -> Iterator[str]:
    yield "complete -c quire -e"
    for command, text in helps.items():
        yield f"complete -c quire -f -n __fish_use_subcommand -a {command} -d {_fish_text(text)}"
    for command, known in flags.items():
        for flag in known:
            kind = "-l" if flag.name.startswith("--") else "-s"
            values = f" -x -a {_fish_text(' '.join(flag.choices))}" if flag.choices else " -r" * flag.takes_value
            where = f"-n '__fish_seen_subcommand_from {command}'"
            yield f"complete -c quire {where} {kind} {flag.name.lstrip('-')}{values} -d {_fish_text(flag.help)}"


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
