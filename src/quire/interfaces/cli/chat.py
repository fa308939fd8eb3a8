"""`quire chat`, `quire run`: a conversation in the terminal, or with the lines of a pipe; one answer to a question that
was typed behind the model. A model that is not here is fetched from the hub."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from quire.errors import RequestError, RequestFailedError, UserError, suggestion
from quire.interfaces.cli.engine_flags import add_engine_flags, add_model_argument, engine_options_of
from quire.interfaces.cli.sampling_flags import SAMPLING_FLAGS, add_sampling_flags, number_of, sampling_of
from quire.interfaces.cli.session import open_engine

if TYPE_CHECKING:
    from quire.interfaces.async_llm import AsyncLLM
    from quire.sampling_params import SamplingParams

_HELP = """\
/help           this list
/set NAME X     a sampling parameter, such as temperature; without X, the model's own again
/show           the model, and what was set
/retry          answer the last question once more
/clear          forget the conversation
/system TEXT    set the instructions that stand before it; without TEXT, remove them
/quit           leave, as Ctrl-D does
Ctrl-C          stop an answer
\"\"\"             begins and ends a question of several lines"""
_COMMANDS = ("/help", "/set", "/show", "/retry", "/clear", "/system", "/quit")
_FENCE = '"""'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [QUESTION] [options]"
    parser.epilog = "in the conversation:\n" + "\n".join(f"  {line}" for line in _HELP.splitlines())
    add_model_argument(parser)
    parser.add_argument("question", metavar="QUESTION", nargs="?", help="answered alone, and that is all")
    parser.add_argument("--system", metavar="TEXT", help="instructions that stand before the conversation")
    add_sampling_flags(parser)
    add_engine_flags(parser, leave_out=("seed",))


def run(arguments: argparse.Namespace) -> int:
    options = engine_options_of(arguments)
    typed = sampling_of(arguments)
    is_terminal = sys.stdin.isatty()
    # One event loop for the whole conversation; the engine belongs to it.
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            engine = runner.run(stack.enter_async_context(open_engine(options)))
            sampling = engine.get_default_sampling_params().replace(**{"max_tokens": None, **typed})
            conversation = Conversation(engine, sampling, arguments.system)
            if arguments.question is not None:
                runner.run(conversation.say(arguments.question))
                return 0
            if is_terminal:
                _enable_line_editing()
                print(f"{engine.config.served_model_name}. /help lists the commands, Ctrl-D leaves.")
            _converse(runner, conversation, is_terminal)
        finally:
            runner.run(stack.aclose())
    return 0


def _converse(runner: asyncio.Runner, conversation: Conversation, is_terminal: bool) -> None:
    while True:
        try:
            line = _question(is_terminal)
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\n(Ctrl-D leaves)")
            continue
        if line == "/retry":
            line = conversation.take_back()
            if not line:
                print("(nothing was asked yet)")
        if line.startswith("/"):
            if not _run_command(conversation, line):
                return
        elif line:
            _answer(runner, conversation, line, is_terminal)


def _question(is_terminal: bool) -> str:
    """A line, or the lines between two fences."""
    line = _line("> ", is_terminal).strip()
    if not line.startswith(_FENCE):
        return line
    lines = [line.removeprefix(_FENCE)]
    while not lines[-1].rstrip().endswith(_FENCE):
        lines.append(_line("... ", is_terminal))
    return "\n".join(lines).rstrip().removesuffix(_FENCE).strip()


def _line(prompt: str, is_terminal: bool) -> str:
    if is_terminal:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _answer(runner: asyncio.Runner, conversation: Conversation, line: str, is_terminal: bool) -> None:
    """One turn. What goes wrong with it alone does not end the conversation."""
    try:
        runner.run(conversation.say(line))
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        print("\n(stopped)")
    except RequestFailedError as error:
        print(f"quire: {error}", file=sys.stderr)
    except RequestError as error:
        print(f"quire: {error} /clear begins anew.", file=sys.stderr)


def _run_command(conversation: Conversation, line: str) -> bool:
    """False: the conversation is over."""
    name, _, rest = line.partition(" ")
    match name:
        case "/quit" | "/exit":
            return False
        case "/help":
            print(_HELP)
        case "/clear":
            conversation.clear()
            print("(forgotten)")
        case "/set":
            _set(conversation, *rest.split(maxsplit=1))
        case "/show":
            print(conversation.description())
        case "/system":
            conversation.system = rest.strip() or None
            print("(instructions set)" if conversation.system else "(no instructions)")
        case _:
            print(f"{name}: there is no such command.{suggestion(name, _COMMANDS) or ' /help lists them.'}")
    return True


def _set(conversation: Conversation, name: str = "", value: str | None = None, *_: str) -> None:
    fields = {field: kind for field, kind, _ in SAMPLING_FLAGS.values()}
    if name not in fields:
        hint = suggestion(name, fields) or f" There are {', '.join(fields)}."
        print(f"/set {name}: there is no such parameter.{hint}")
        return
    try:
        conversation.set(name, None if value is None else number_of(name, fields[name], value))
    except UserError as error:
        print(error)


class Conversation:
    """What was said so far. A turn enters it only with an answer, whole or stopped."""

    def __init__(self, engine: AsyncLLM, sampling: SamplingParams, system: str | None = None) -> None:
        self._engine = engine
        self._usual = self._sampling = sampling
        self._changed: dict[str, int | float] = {}
        self.system = system
        self.turns: list[dict[str, str]] = []

    def set(self, name: str, value: int | float | None) -> None:
        """None: as it was at the start. Raises RequestError for what is out of bounds."""
        changed = {key: kept for key, kept in {**self._changed, name: value}.items() if kept is not None}
        self._sampling = self._usual.replace(**changed)
        self._changed = changed

    def description(self) -> str:
        changed = ", ".join(f"{name} {value}" for name, value in self._changed.items())
        num_questions = len(self.turns) // 2
        return (
            f"model    {self._engine.config.served_model_name}\nsystem   {self.system or '-'}\n"
            f"set      {changed or '-'}\nasked    {num_questions}"
        )

    def take_back(self) -> str:
        """The last question, as if it had not been asked; empty: there is none."""
        if not self.turns:
            return ""
        self.turns, last = self.turns[:-2], self.turns[-2]
        return last["content"]

    def clear(self) -> None:
        self.turns = []

    async def say(self, text: str) -> None:
        """Streams the answer to stdout and remembers both."""
        question = {"role": "user", "content": text}
        instructions = [{"role": "system", "content": self.system}] if self.system else []
        rendered = self._engine.renderer.render_prompt([*instructions, *self.turns, question])
        pieces: list[str] = []
        try:
            async for output in self._engine.generate(rendered, self._sampling, delta=True):
                pieces.append(output.outputs[0].text)
                print(pieces[-1], end="", flush=True)
            print(flush=True)
        finally:
            if pieces:
                self.turns += [question, {"role": "assistant", "content": "".join(pieces)}]


def _enable_line_editing() -> None:
    """Arrow keys and a history of lines, where Python was built with readline."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)
