"""`quire chat`: a conversation in the terminal, or with the lines of a pipe."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from quire.errors import RequestError, RequestFailedError, suggestion
from quire.interfaces.cli.engine_flags import add_engine_flags, add_model_argument, engine_options_of
from quire.interfaces.cli.sampling_flags import add_sampling_flags, sampling_of
from quire.interfaces.cli.session import open_engine

if TYPE_CHECKING:
    from quire.interfaces.async_llm import AsyncLLM
    from quire.sampling_params import SamplingParams

_HELP = """\
/help           this list
/clear          forget the conversation
/system TEXT    set the instructions that stand before it; without TEXT, remove them
/quit           leave, as Ctrl-D does
Ctrl-C          stop an answer"""
_COMMANDS = ("/help", "/clear", "/system", "/quit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.epilog = "in the conversation:\n" + "\n".join(f"  {line}" for line in _HELP.splitlines())
    add_model_argument(parser)
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
            line = input("> ").strip() if is_terminal else _line_of_pipe()
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\n(Ctrl-D leaves)")
            continue
        if line.startswith("/"):
            if not _run_command(conversation, line):
                return
        elif line:
            _answer(runner, conversation, line, is_terminal)


def _line_of_pipe() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()


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
        case "/system":
            conversation.system = rest.strip() or None
            print("(instructions set)" if conversation.system else "(no instructions)")
        case _:
            print(f"{name}: there is no such command.{suggestion(name, _COMMANDS) or ' /help lists them.'}")
    return True


class Conversation:
    """What was said so far. A turn enters it only with an answer, whole or stopped."""

    def __init__(self, engine: AsyncLLM, sampling: SamplingParams, system: str | None = None) -> None:
        self._engine = engine
        self._sampling = sampling
        self.system = system
        self.turns: list[dict[str, str]] = []

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
