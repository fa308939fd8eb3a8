"""The first word chooses a command; a user's mistake is one line on stderr, never a traceback.

Imports a command's file only when it is asked for, so `quire --version` and `quire --help` answer at once.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from quire.errors import OptionError, QuireError, UserError, one_line, suggestion
from quire.interfaces.cli.parser import CommandParser
from quire.observability.logging import FORMAT_VARIABLE, LEVEL_VARIABLE, configure_logging
from quire.version import __version__

logger = logging.getLogger("quire.cli")

# command -> (module, what it does)
COMMANDS = {
    "serve": ("quire.interfaces.cli.serve", "answer HTTP requests in the way of OpenAI's API"),
    "chat": ("quire.interfaces.cli.chat", "talk with a model in the terminal"),
    "run": ("quire.interfaces.cli.chat", "the same: talk with a model, or have one question answered"),
    "pull": ("quire.interfaces.cli.pull", "fetch a model from the hub"),
    "list": ("quire.interfaces.cli.list_models", "list the models on this machine"),
    "rm": ("quire.interfaces.cli.rm", "delete a model that was fetched"),
    "deploy": ("quire.interfaces.cli.deploy", "several copies of a server behind one front, on machines of Ray"),
    "route": ("quire.interfaces.cli.route", "one address in front of servers for prompts and servers for output"),
    "generate": ("quire.interfaces.cli.generate", "continue a text, or several"),
    "run-batch": ("quire.interfaces.cli.run_batch", "answer a file of requests without a server"),
    "bench": ("quire.interfaces.cli.bench", "measure throughput and latency"),
    "trace": ("quire.interfaces.cli.trace", "save the last decisions of a running server as a trace"),
    "replay": ("quire.interfaces.cli.replay", "run a recorded run of an engine once more, and say where it differs"),
    "plan": ("quire.interfaces.cli.plan", "say what a model needs and a machine allows, before loading"),
    "verify": ("quire.interfaces.cli.verify", "hold a model against Transformers, or its engine against training"),
    "simulate": ("quire.interfaces.cli.simulate", "run a trace of requests on devices that are not here"),
    "repro": ("quire.interfaces.cli.repro", "run the figures of the paper on the simulated engine"),
    "api-key": ("quire.interfaces.cli.api_key", "make a key for a server, and its line for the key file"),
    "options": ("quire.interfaces.cli.options", "print the table of all engine options in Markdown"),
    "completion": ("quire.interfaces.cli.completion", "print what a shell needs to complete commands and flags"),
}

_EXAMPLES = """
examples:
  quire chat                               talk with the small model that ships with Quire
  quire serve                              serve it on http://127.0.0.1:8000/v1
  quire serve ./my-model --port 9000       serve a Hugging Face checkpoint
  quire generate "Once upon a time" --max-tokens 50
  cat notes.txt | quire generate --temperature 0
  quire run-batch -i requests.jsonl -o answers.jsonl
  quire bench --num-requests 32 --json
  quire bench stream ./my-model            one request alone, beside what the machine allows

`quire COMMAND --help` lists the options of a command.
"""

# What a command says on stderr unless it is told otherwise: the others keep stderr for what is wrong.
_LEVELS = {"serve": "info", "deploy": "info", "route": "info"}

# characters of an error
_LONGEST = 4000

OK = 0
ENGINE_FAILED = 1
USER_MISTAKE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code of the process, unless Ctrl-C ends it."""
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        # here and not when the interpreter ends, so that a reader who has gone is met below
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # `quire generate ... | head`: the reader has seen enough. Python would complain when it flushes stdout again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except QuireError as error:
        text = str(error)
        # a value out of somebody's file may be as long as it likes
        print(f"quire: error: {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}", file=sys.stderr)
        return USER_MISTAKE if isinstance(error, UserError) else ENGINE_FAILED
    except OSError as error:
        # a name that is too long for a file, a disk that is full
        logger.debug("the command failed", exc_info=True)
        print(f"quire: error: {one_line(error)}", file=sys.stderr)
        return ENGINE_FAILED


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return OK
    if argv[0] in ("-V", "--version"):
        print(f"quire {__version__}")
        return OK
    if argv[0] not in COMMANDS:
        kind = "option" if argv[0].startswith("-") else "command"
        known = ["--help", "--version"] if kind == "option" else list(COMMANDS)
        hint = suggestion(argv[0], known) or f" There are: {', '.join(known)}."
        raise OptionError(f"{argv[0]}: there is no such {kind}.{hint}")
    module_name, description = COMMANDS[argv[0]]
    command: Any = importlib.import_module(module_name)
    words = argv[0]
    rest = argv[1:]
    # A command may have commands of its own: each is an object with add_arguments, run and a description.
    inner = command.subcommand(rest[0]) if rest and hasattr(command, "subcommand") else None
    if inner is not None:
        command = inner
        description = inner.description
        words = f"{words} {rest[0]}"
        rest = rest[1:]
    parser = CommandParser(prog=f"quire {words}", description=f"{description[0].upper()}{description[1:]}.")
    command.add_arguments(parser)
    try:
        arguments = parser.parse(rest)
    except SystemExit:  # --help has printed what was asked for
        return OK
    if "log_level" in arguments:
        if arguments.log_format:
            os.environ[FORMAT_VARIABLE] = arguments.log_format
        _configure_logging(arguments.log_level or os.environ.get(LEVEL_VARIABLE) or _LEVELS.get(argv[0], "warning"))
    if parser.remark:
        logger.warning("%s", parser.remark)
    return int(command.run(arguments))


def _configure_logging(level: str) -> None:
    # by the environment, so that the engine's own process and the server do the same
    os.environ[LEVEL_VARIABLE] = level
    configure_logging(level)


def help_text() -> str:
    width = max(len(name) for name in COMMANDS)
    commands = "\n".join(f"  {name:<{width}}  {description}" for name, (_, description) in COMMANDS.items())
    return (
        f"quire {__version__}: an LLM inference engine\n\n"
        f"usage: quire COMMAND [options]\n\ncommands:\n{commands}\n\n"
        f"options:\n  -h, --help     this text\n  -V, --version  the version\n{_EXAMPLES}"
    ).rstrip()
